"""A model as ONNX, with its preprocessing inside: what a device needs to predict without PyTorch.

Shapes: n samples, S height and width of the networks' input, C classes.
"""

import importlib.util
import json
import logging
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedkace_flwr.errors import ModelError
from fedkace_flwr.inference.kept_models import KeptModels, Predictor
from fedkace_flwr.inference.tensor_file import described
from fedkace_flwr.seeding import generator_for

TOLERANCE = 1e-4
"""Largest difference of a probability that is accepted."""

_PACKAGES = ("onnx", "onnxscript", "onnxruntime")
_INSTALL = "pip install 'fedkace-flwr[onnx]'"
_BATCHES = (1, 3)


class ToProbabilities(nn.Module):
    """What :meth:`fedkace_flwr.inference.kept_models.Predictor.probabilities` computes, in float32 from end to end.

    Parameters
    ----------
    predictor : Predictor
        The networks; they are shared, not copied.
    """

    def __init__(self, predictor: Predictor) -> None:
        super().__init__()
        self.networks = nn.ModuleList(net for net, _ in predictor.networks)
        self._scale, self._shift = predictor.preprocess.scale, predictor.preprocess.shift
        self._seen, self._shares = predictor.seen, predictor.shares
        self._mirrored = [mirrored for _, mirrored in predictor.networks]

    def forward(self, images: Tensor) -> Tensor:
        """Map uint8 (n, 3, S, S), or float32 (n, ...), to probabilities, float32 (n, C)."""
        x = images.to(torch.float32) * self._scale + self._shift
        found: list[Tensor] = []
        for net, mirrored in zip(self.networks, self._mirrored, strict=True):
            views = (x, x.flip(3)) if mirrored else (x,)
            found += [net(view).masked_fill(~self._seen, -torch.inf).softmax(dim=1) for view in views]
        if len(found) == 1:
            return found[0]
        if self._shares:
            weighted = [share * each for share, each in zip(self._shares, found, strict=True)]
            return torch.stack(weighted).sum(dim=0)
        return torch.stack(found).mean(dim=0)


def check_installed() -> None:
    """Check that the packages are there with which a model becomes ONNX, and is checked.

    Raises
    ------
    ModelError
        One is missing.
    """
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ModelError(f"--onnx: {' and '.join(missing)} must be installed: {_INSTALL}")


def to_onnx(kept: KeptModels) -> tuple[bytes, float]:
    """Return the content of ``model.onnx``, and how far it is from the model.

    Its input is ``images``, uint8 (n, 3, S, S), or ``arrays``, float32 (n, ...), for any n; its output ``probabilities``, float32 (n, C). It computes in
    float32, also where the model computes in bfloat16. Its metadata are those of ``model.safetensors``.

    Parameters
    ----------
    kept : KeptModels
        The model.

    Returns
    -------
    content : bytes
        The file.
    difference : float
        Largest difference of a probability on samples of noise, with onnxruntime.

    Raises
    ------
    ModelError
        The networks cannot be exported, or answer differently as ONNX.
    """
    predictor = Predictor(replace(kept, precision="float32"))
    content = _exported(predictor)
    difference = _difference(content, predictor)
    if not difference <= TOLERANCE:
        raise ModelError(
            f"network = {kept.network!r}: as ONNX its probabilities differ by {difference:.2g}; must be at most "
            f"{TOLERANCE:g}, so no model.onnx is written"
        )
    return content, difference


def _exported(predictor: Predictor) -> bytes:
    import onnx

    kept = predictor.kept
    samples, *_ = _noise(kept, (2,))
    dimensions = ({0: torch.export.Dim("n", min=1)},)
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            program = torch.onnx.export(
                ToProbabilities(predictor).eval(),
                (torch.from_numpy(samples),),
                dynamo=True,
                dynamic_shapes=dimensions,
                input_names=[input_of(kept)],
                output_names=["probabilities"],
                external_data=False,
                verbose=False,
            )
        assert program is not None
        model = program.model_proto
        _strip(model)
        texts = {
            name: value if isinstance(value, str) else json.dumps(value) for name, value in described(kept).items()
        }
        onnx.helper.set_model_props(model, texts)
        onnx.checker.check_model(model)
        return bytes(model.SerializeToString())
    except Exception as fault:  # exporters raise anything, and another package's network may be beyond them
        reason = (str(fault).splitlines() or [type(fault).__name__])[0]
        raise ModelError(f"network = {kept.network!r}: cannot be exported to ONNX ({reason:.300})") from fault
    finally:
        logger.setLevel(level)


def _strip(model: Any) -> None:
    """Remove what the exporter tells of the code and this machine's folders."""
    graph = model.graph
    for part in (graph, *graph.node, *graph.input, *graph.output, *graph.value_info, *graph.initializer):
        del part.metadata_props[:]
        part.doc_string = ""


def _difference(content: bytes, predictor: Predictor) -> float:
    import onnxruntime

    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 3
    session = onnxruntime.InferenceSession(content, settings, providers=["CPUExecutionProvider"])
    most = 0.0
    for samples in _noise(predictor.kept, _BATCHES):
        (found,) = session.run(["probabilities"], {input_of(predictor.kept): samples})
        wanted = predictor.probabilities(torch.from_numpy(samples)).numpy()
        if found.shape != wanted.shape:
            return float("inf")
        most = max(most, float(np.abs(found - wanted).max()))
    return most


def input_of(kept: KeptModels) -> str:
    """Name of the input."""
    return "images" if kept.form.is_picture else "arrays"


def _noise(kept: KeptModels, sizes: tuple[int, ...]) -> list[NDArray[Any]]:
    """Batches of noise, uint8 (n, 3, S, S), or float32 (n, ...) with the mean and deviation of the training samples."""
    generator, form = generator_for(0, "images for ONNX"), kept.form
    if form.is_picture:
        return [torch.randint(256, (n, *form.shape), generator=generator).to(torch.uint8).numpy() for n in sizes]
    mean, std = (torch.tensor(each).view(-1, *(1 for _ in form.shape[1:])) for each in (kept.mean, kept.std))
    return [(torch.randn((n, *form.shape), generator=generator) * std + mean).numpy() for n in sizes]
