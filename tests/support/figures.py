"""What figures show, for tests."""

from matplotlib.figure import Figure


def drawn_in_panels(figure: Figure) -> dict[str, list[str]]:
    """The labels of the lines in each visible panel of a figure, by its title."""
    panels = [axes for axes in figure.axes if axes.get_visible() and axes.get_title()]
    return {axes.get_title(): sorted(str(line.get_label()) for line in axes.get_lines()) for axes in panels}
