"""The client of FedFrame, the project's own method: learning towards a fixed frame, and answers of several models.

``docs/fedframe.md`` has the idea and the measurements.
"""

from fedkace_flwr.clients.er import BalancedReplayClient
from fedkace_flwr.keys import Scalar
from fedkace_flwr.registry import Method

PARTS: dict[str, Scalar] = {
    "output-layer": "simplex",  # everyone learns towards the same directions (fedkace_flwr/networks/output.py)
    "augment": "auto",  # small buffers overfit (fedkace_flwr/training/augmentation.py)
    "logit-adjustment": 1.0,  # a class with few images does not lose to one with many (fedkace_flwr/training/losses.py)
    "recalibrate-batchnorm": True,  # batch-norm statistics of the client's own images (fedkace_flwr/training/recalibration.py)
    "classifier": "fading",  # a discriminant, while features do not fit the frame (fedkace_flwr/training/discriminant.py)
    "predict-with": "prequential",  # local and global model together, weighted by each new chunk as a test
    "test-time-augmentation": "auto",  # and the global model's view of the mirrored image
}
"""What FedFrame adds to plain replay from a class-balanced buffer; each is a key that any method can be given."""


class FedFrameClient(BalancedReplayClient):
    """Trains on chunk and balanced buffer by cross-entropy over all classes met; :data:`PARTS` does the rest."""


METHOD = Method(FedFrameClient, "FedFrame", role="method", preset=PARTS, is_mean=True)
