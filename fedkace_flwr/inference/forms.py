"""The file in a form that a browser or ``curl -F`` sends (``multipart/form-data``)."""

from typing import Any

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from fedkace_flwr.errors import DataError

KIND = "multipart/form-data"
"""The content type of a form."""

_PARTS, _HEADERS = 11, 8192  # a file and ten fields; bytes of a part's headers


def file_in(body: bytes, content_type: str) -> bytes:
    """Return the one file of a form.

    Parameters
    ----------
    body : bytes
        The whole form.
    content_type : str
        The request's header, with the boundary.

    Raises
    ------
    DataError
        The form is malformed, or holds no file or several.
    """
    boundary = parse_options_header(content_type)[1].get(b"boundary")
    if not boundary:
        raise DataError("the form is malformed: its content type names no boundary")
    found = _Parts()
    try:
        parser = MultipartParser(boundary, found.callbacks())
        parser.write(body)
        parser.finalize()
    except FormParserError as error:
        raise DataError(f"the form is malformed: {' '.join(str(error).split())}") from error
    if found.file is None:
        raise DataError("the form holds no file; send one, with a file name")
    return b"".join(found.file)


class _Parts:
    """Keeps the data of the part that has a file name, and drops that of the others."""

    def __init__(self) -> None:
        self.file: list[bytes] | None = None
        self._parts = self._size = 0
        self._in_file = False
        self._name, self._value, self._disposition = b"", b"", b""

    def callbacks(self) -> Any:
        """What the parser calls, by its names."""
        return {
            "on_part_begin": self._begin,
            "on_header_field": self._header_name,
            "on_header_value": self._header_value,
            "on_header_end": self._header_end,
            "on_headers_finished": self._headers_end,
            "on_part_data": self._data,
        }

    def _begin(self) -> None:
        self._parts += 1
        if self._parts > _PARTS:
            raise DataError(f"the form is malformed: more than {_PARTS} parts")
        self._in_file, self._size = False, 0
        self._name, self._value, self._disposition = b"", b"", b""

    def _header_name(self, data: bytes, start: int, end: int) -> None:
        self._count(end - start)
        self._name += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._count(end - start)
        self._value += data[start:end]

    def _header_end(self) -> None:
        if self._name.lower() == b"content-disposition":
            self._disposition = self._value
        self._name, self._value = b"", b""

    def _headers_end(self) -> None:
        if b"filename" not in parse_options_header(self._disposition)[1]:
            return
        if self.file is not None:
            raise DataError("the form is malformed: more than one file")
        self._in_file, self.file = True, []

    def _data(self, data: bytes, start: int, end: int) -> None:
        if self._in_file and self.file is not None:
            self.file.append(data[start:end])

    def _count(self, size: int) -> None:
        self._size += size
        if self._size > _HEADERS:
            raise DataError(f"the form is malformed: a part with more than {_HEADERS} bytes of headers")
