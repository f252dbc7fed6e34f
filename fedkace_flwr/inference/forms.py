"""The file in a form that a browser or ``curl -F`` sends (``multipart/form-data``)."""

from email.message import Message

from fedkace_flwr.errors import DataError

KIND = "multipart/form-data"
"""The content type of a form."""

_PARTS = 11  # a file and ten fields


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
    header = Message()
    header["content-type"] = content_type
    boundary = header.get_boundary("")
    if not boundary:
        raise DataError("the form is malformed: its content type names no boundary")
    delimiter = b"\r\n--" + boundary.encode("latin-1", "replace")
    _, *parts = (b"\r\n" + body).split(delimiter, _PARTS + 1)
    *parts, end = parts or [b""]
    if not end.startswith(b"--"):
        raise DataError(f"the form is malformed: it has no end, or more than {_PARTS} parts")
    files = []
    for part in parts:
        head, empty, content = part.partition(b"\r\n\r\n")
        if not head.startswith(b"\r\n") or not empty:
            raise DataError("the form is malformed: a part has no header")
        if b"filename" in head.lower():
            files.append(content)
    if not files:
        raise DataError("the form holds no file; send one, with a file name")
    if len(files) > 1:
        raise DataError("the form is malformed: more than one file")
    return files[0]
