"""A model from pixels to probabilities in one module, for programs that have neither this package nor its settings.

Shapes: n images, S height and width of the networks' input, C classes.
"""

import torch
from torch import Tensor, nn

from fedkace_flwr.inference.kept_models import Predictor


class PixelsToProbabilities(nn.Module):
    """What :meth:`fedkace_flwr.inference.kept_models.Predictor.probabilities` computes, in float32 from end to end.

    Parameters
    ----------
    predictor : Predictor
        The networks; they are shared, not copied.
    """

    def __init__(self, predictor: Predictor) -> None:
        super().__init__()
        self.networks = nn.ModuleList(net for net, _, _ in predictor.networks)
        self._scale, self._shift = predictor.preprocess.scale, predictor.preprocess.shift
        self._seen, self._averages = predictor.seen, predictor.kept.combined == "mean"
        self._shares = predictor.shares
        self._mirrored = [mirrored for _, _, mirrored in predictor.networks]
        alone = len(predictor.networks) + sum(self._mirrored) == 1
        self._masks = [self._mask(own, alone=alone) for _, own, _ in predictor.networks]

    def _mask(self, own: Tensor, *, alone: bool) -> Tensor:
        """The classes among which a network's probabilities are taken, bool (C,), given those that it predicts."""
        if alone:
            return own & self._seen
        return self._seen if self._averages else own

    def forward(self, images: Tensor) -> Tensor:
        """Map uint8 (n, 3, S, S) to probabilities, float32 (n, C)."""
        x = images.to(torch.float32) * self._scale + self._shift
        found: list[Tensor] = []
        for net, mask, mirrored in zip(self.networks, self._masks, self._mirrored, strict=True):
            views = (x, x.flip(3)) if mirrored else (x,)
            found += [net(view).masked_fill(~mask, -torch.inf).softmax(dim=1) for view in views]
        if len(found) == 1:
            return found[0]
        if self._averages and self._shares:
            weighted = [share * each for share, each in zip(self._shares, found, strict=True)]
            return torch.stack(weighted).sum(dim=0)
        if self._averages:
            return torch.stack(found).mean(dim=0)
        most = torch.stack(found).amax(dim=0).masked_fill(~self._seen, 0.0)
        return most / most.sum(dim=1, keepdim=True)
