"""What the Ray workers of a simulation import while they start.

Ray imports this module itself (``fedkace_flwr.flower.lean_ray.PRELOADED``). Garbage collection stays off until the worker's
first message.
"""

import importlib

from fedkace_flwr.flower.imports import pause_collection

pause_collection()
importlib.import_module("fedkace_flwr.flower.internals").import_actor()
