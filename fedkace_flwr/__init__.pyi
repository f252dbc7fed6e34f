from fedkace_flwr.experiments.api import run as run
from fedkace_flwr.export.loading import load_model as load_model

__version__: str
