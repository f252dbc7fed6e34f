"""Readers of original image files, one module for each kind; :mod:`fedkace_flwr.data.datasets` prepares what they read.

Other packages describe their data sets with the three classes that are imported here.
"""

from fedkace_flwr.data.readers.source import Content, Origin, Source

__all__ = ["Content", "Origin", "Source"]
