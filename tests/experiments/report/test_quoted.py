"""Tables of results that documents quote."""

from pathlib import Path

import pytest
from support.made.results import write_run, write_study

from fedkace_flwr.errors import ResultsError
from fedkace_flwr.experiments.report.quoted import main, with_tables

PAGE = "# Mine\n\n<!-- table kept aa -->\nold\n<!-- end of table -->\n\nBetween.\n\n<!-- table kept late -->\n<!-- end of table -->\n"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A folder with the results of two methods beside a document."""
    runs = {}
    for method, accuracies in {"fedkace": [0.2, 0.5], "er": [0.2, 0.3]}.items():
        write_run(tmp_path / "kept", method, accuracies, method=method)
        runs[method] = {"method": method, "seed": 0}
    write_study(tmp_path / "kept", runs)
    return tmp_path


def test_tables_stand_between_their_markers_and_the_rest_stays(base: Path) -> None:
    (base / "page.md").write_text(PAGE)
    assert main([str(base / "page.md")]) is None
    page = (base / "page.md").read_text()
    first, second = page.split("Between.")
    assert "old" not in page and page.startswith("# Mine\n\n<!-- table kept aa -->\n\n### Average accuracy (AA), %\n")
    assert "| FedKACE | 35.00 (n=1) |" in first and "| ER | 25.00 (n=1) |" in first
    assert "| FedKACE | 50.00 (n=1) |" in second and "| ER | 30.00 (n=1) |" in second
    assert with_tables(page, base) == page


def test_stages_of_a_run_stand_side_by_side_with_their_number_of_seeds(base: Path) -> None:
    runs: dict[str, dict[str, object]] = {}
    for method, overlap, seed, accuracies in (
        ("fedkace", 1, 0, [0.2, 0.4, 0.6, 0.8]),
        ("fedkace", 1, 1, [0.4, 0.4, 0.6, 0.8]),
        ("fedkace", 0, 0, [0.1, 0.1, 0.2, 0.4]),
        ("er", 1, 0, [0.4, 0.2, 0.2, 0.2]),
    ):
        name = f"{method}_overlap-{overlap}_seed-{seed}"
        write_run(base / "stages", name, accuracies, method=method, overlap=overlap, seed=seed)
        runs[name] = {"method": method, "overlap": overlap, "seed": seed}
    write_study(base / "stages", runs)
    page = with_tables("<!-- table stages stages -->\n<!-- end of table -->\n", base)
    assert "#" not in page
    assert ": AA | first quarter | second half |" in page
    assert "| FedKACE | 2, 1 | 52.50 ± 3.54 | 30.00 ± 14.14 | 70.00 ± 0.00 | 20.00 | 10.00 | 30.00 |" in page
    assert "| ER | 1 | 25.00 | 40.00 | 20.00 | - | - | - |" in page


def test_differences_are_taken_from_the_line_that_the_marker_names(base: Path) -> None:
    runs: dict[str, dict[str, object]] = {}
    for method, seed, accuracies in (("fedkace", 0, [0.2]), ("fedkace", 1, [0.3]), ("er", 0, [0.5]), ("er", 1, [0.5])):
        name = f"{method}_seed-{seed}"
        write_run(base / "seeds", name, accuracies, method=method, seed=seed)
        runs[name] = {"method": method, "seed": seed}
    write_study(base / "seeds", runs)
    page = "<!-- table seeds {} -->\n<!-- end of table -->\n"
    assert "| ER | FedKACE | +25.00 | " in with_tables(page.format("differences"), base)
    from_er = with_tables(page.format("differences:ER"), base)
    assert "| FedKACE | ER | -25.00 | " in from_er and "| ER | FedKACE |" not in from_er
    with pytest.raises(ResultsError, match="no table 'differences:EE'; did you mean differences:ER"):
        with_tables(page.format("differences:EE"), base)


@pytest.mark.parametrize(
    ("page", "words"),
    [
        (PAGE.replace("kept aa", "kept average"), "kept: no table 'average'; it has aa, "),
        (PAGE.replace("kept late", "kept lat"), "kept: no table 'lat'; did you mean late?"),
        (PAGE.replace("kept aa", "lost aa"), "lost"),
        (PAGE.replace("old\n<!-- end of table -->", "old\n"), "has no <!-- end of table --> before the next one"),
        (PAGE.replace("kept aa", "kept"), "is not as <!-- table FOLDER KEY -->"),
    ],
)
def test_a_marker_that_names_no_table_is_refused_and_the_document_stays(base: Path, page: str, words: str) -> None:
    (base / "page.md").write_text(page)
    with pytest.raises(ResultsError) as caught:
        with_tables(page, base)
    said = main([str(base / "page.md")])
    assert words in str(caught.value) and said == f"{base / 'page.md'}: {caught.value}"
    assert (base / "page.md").read_text() == page
