"""What every network of the catalogue does, whatever it is made of."""

import copy
from functools import partial

import pytest
import torch
from support.gradients import gradient_of
from support.tools import need_modules
from torch import Tensor

from fedkace_flwr.algorithms.refed_scores import all_gradients
from fedkace_flwr.compute.torchvision_compat import import_torchvision
from fedkace_flwr.errors import ConfigError
from fedkace_flwr.experiments.running.workers import activations
from fedkace_flwr.networks.catalogue import NETWORKS, Facts, built, facts_of, seeded
from fedkace_flwr.networks.network import Blueprint, Network
from fedkace_flwr.samples import Form
from fedkace_flwr.sections import TrainingConfig
from fedkace_flwr.training import sample_gradients
from fedkace_flwr.training.loop import Preprocess, features_of, train
from fedkace_flwr.training.losses import TaskLoss
from fedkace_flwr.training.recalibration import recalibrate

CLASSES = 5
WITH_NORM = {
    "resnet18": True,
    "mobilenet-v3-small": True,
    "efficientnet-b0": True,
    "vit": False,
    "cnn": False,
    "mlp": False,
    "cnn1d": True,
    "timm:test_resnet": True,
    "timm:test_vit": False,
}
PATCHES = {"timm:test_vit": 4}  # whose patches are so many times as wide as the smallest images here
PIXELS = Preprocess.by_statistics((0.5,) * 3, (0.25,) * 3, torch.device("cpu"))

every_network = pytest.mark.parametrize("name", WITH_NORM)


def blueprint(name: str, size: int = 8) -> Blueprint:
    """Of series for the network that takes nothing else, and of pictures for the others."""
    if name not in NETWORKS:
        need_modules("timm")
    return Blueprint(CLASSES, (3, size) if name == "cnn1d" else size * PATCHES.get(name, 1), 2)


def network(name: str, seed: int = 0, size: int = 8) -> Network:
    net = seeded(name, blueprint(name, size), seed)
    return net.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def images(count: int, size: int = 8) -> torch.Tensor:
    draws = torch.Generator().manual_seed(count)
    return torch.randint(0, 256, (count, 3, size, size), generator=draws, dtype=torch.uint8)


def samples(name: str, count: int, size: int = 8) -> torch.Tensor:
    pictures = images(count, size * PATCHES.get(name, 1))
    return pictures[:, :, 0].float() / 255 if name == "cnn1d" else pictures


def preprocess(name: str) -> Preprocess:
    form = Form.array(3, 8) if name == "cnn1d" else None
    return Preprocess.by_statistics((0.5,) * 3, (0.25,) * 3, torch.device("cpu"), form)


def batch_of(name: str, count: int, size: int = 8) -> torch.Tensor:
    return preprocess(name)(samples(name, count, size))


@every_network
@pytest.mark.parametrize("size", [8, 32])
def test_features_and_logits(name: str, size: int) -> None:
    net, batch = network(name, size=size).eval(), batch_of(name, 3, size)
    with torch.inference_mode():
        features, logits = net.features(batch), net(batch)
        with net.computing_in(torch.bfloat16):
            rounded = net.features(batch)
        assert torch.equal(logits, net.output(features))
    assert features.shape == (3, net.output.in_features) and logits.shape == (3, CLASSES)
    assert {features.dtype, logits.dtype, rounded.dtype} == {torch.float32}
    assert 0 < (rounded - features).norm() < 0.1 * features.norm()


@every_network
def test_initial_weights_follow_the_seed_alone(name: str) -> None:
    torch.manual_seed(1)
    before, one = torch.get_rng_state(), network(name, 3).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    again, other = network(name, 3).state_dict(), network(name, 4).state_dict()
    assert all(torch.equal(one[key], again[key]) for key in one)
    assert not torch.equal(one["output.weight"], other["output.weight"])


@every_network
def test_nothing_is_drawn_in_a_pass(name: str) -> None:
    """Published networks drop units and layers at random, by a generator that knows nothing of clients and rounds."""
    net, batch = network(name), batch_of(name, 6)
    before = torch.get_rng_state()
    first, second = (copy.deepcopy(net).train()(batch) for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), before)


@every_network
def test_what_is_known_of_it_without_weights(name: str) -> None:
    net, half = network(name), None
    if net.splits:
        maps = net.eval().lower_half()(batch_of(name, 1))
        half = (maps.shape[1], max(maps.shape[2:]))
    assert facts_of(name, blueprint(name)) == Facts(net.output.in_features, WITH_NORM[name], half)


@pytest.mark.parametrize("name", NETWORKS)
def test_its_halves_make_the_whole(name: str) -> None:
    net, batch = network(name).eval(), batch_of(name, 3)
    with torch.inference_mode():
        whole, maps = net(batch), net.lower_half()(batch)
        assert torch.equal(net.upper_half()(maps), whole)


def test_a_network_that_cannot_be_split_says_so() -> None:
    class Plain(Network):
        def embed(self, x: Tensor) -> Tensor:
            return x

    for half in (Plain().lower_half, Plain().upper_half):
        with pytest.raises(ConfigError, match="Plain cannot be split"):
            half()


@every_network
@pytest.mark.parametrize("together", [1, 1 << 24])
def test_gradients_of_samples_are_those_taken_one_by_one(
    name: str, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For networks without rules for their layers, in parts of one sample or all at a time.

    In double precision, where what remains of a difference is a mistake and not the rounding of one processor.
    """
    monkeypatch.setattr(sample_gradients, "_GRADIENTS", together)
    net = network(name).double()
    net.train()(batch_of(name, 16).double())  # statistics to normalise by
    net.eval()
    batch, labels, seen = (
        batch_of(name, 4).double(),
        torch.tensor([0, 1, 2, 0]),
        torch.tensor([True, True, True, False, False]),
    )
    parameters = dict(net.named_parameters())
    norms, total = all_gradients(net, seen)({key: each.detach() for key, each in parameters.items()}, (batch, labels))
    squares, sums = [], [torch.zeros_like(each) for each in parameters.values()]
    for image, label in zip(batch, labels, strict=True):
        logits = net(image[None]).masked_fill(~seen, -torch.inf)
        own = torch.autograd.grad(torch.nn.functional.cross_entropy(logits, label[None]), list(parameters.values()))
        squares.append(sum(each.double().square().sum() for each in own))
        sums = [before + each for before, each in zip(sums, own, strict=True)]
    assert torch.allclose(norms.double(), torch.stack(squares), rtol=1e-6)  # type: ignore[arg-type]
    assert all(
        torch.allclose(total[key], mean, rtol=1e-6, atol=1e-9) for key, mean in zip(parameters, sums, strict=True)
    )


@every_network
def test_a_step_over_kept_tensors_is_the_plain_step(name: str) -> None:
    """The step that a GPU would record; with batches of different sizes, and samples of a buffer."""
    nets = [network(name, 1), network(name, 1)]
    labels, seen = torch.arange(12) % CLASSES, torch.ones(CLASSES, dtype=torch.bool)
    given, augment = samples(name, 12), "none" if name == "cnn1d" else "flip-shift"
    settings = TrainingConfig(epochs=2, batch_size=5, learning_rate=0.001, augment=augment)  # type: ignore[arg-type]
    for net, captured in zip(nets, (False, True), strict=True):
        training = partial(train, net, (given[:8], labels[:8]), (given[8:], labels[8:]))
        training(
            TaskLoss(seen, seen),
            settings,
            preprocess(name),
            torch.Generator().manual_seed(2),
            augmentation=torch.Generator().manual_seed(3),
            captured=captured,
        )
    first, second = (net.state_dict() for net in nets)
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert any(not torch.equal(first[key], value) for key, value in network(name, 1).state_dict().items())


@every_network
def test_gradients_lie_in_memory_as_their_parameters_do(name: str) -> None:
    """So that no step has to copy them, and because on a CPU the fused AdamW pairs the two by their place alone."""
    for size, precision in ((8, torch.float32), (40, torch.float32), (8, torch.bfloat16)):
        net = network(name, size=size).train()
        net.precision = precision
        torch.autograd.backward(net(batch_of(name, 4, size)).square().mean())
        for key, parameter in net.named_parameters():
            steps = [
                [step for step, length in zip(each.stride(), each.shape, strict=True) if length > 1]
                for each in (parameter, gradient_of(parameter))
            ]
            assert steps[0] == steps[1], key


@every_network
def test_only_statistics_change_when_they_are_taken_anew(name: str) -> None:
    net = network(name).train()
    before = {key: value.clone() for key, value in net.state_dict().items()}
    recalibrate(net, samples(name, 20), preprocess(name), torch.Generator().manual_seed(0))
    assert not net.training
    changed = {key for key, value in net.state_dict().items() if not torch.equal(value, before[key])}
    assert bool(changed) == WITH_NORM[name]
    assert all(key.endswith((".running_mean", ".running_var", ".num_batches_tracked")) for key in changed)


@every_network
def test_its_memory_is_known(name: str) -> None:
    """Of passes, by the largest map, and of steps, by what a pass keeps for its way back."""
    net = network(name).eval()
    shape, larger_shape = blueprint(name).shape, blueprint(name, 16).shape
    high, wide, channels = net.largest_map(*shape)
    assert high * wide * channels >= net.output.in_features
    assert net.largest_map(*shape) == (high, wide, channels) and not net.training
    larger = network(name, size=16)
    assert activations(larger, larger_shape) > 1.4 * activations(net, shape) > 0
    features = features_of(net, lambda block: block, samples(name, 7), preprocess(name))
    assert features.shape == (7, net.output.in_features)


@pytest.mark.parametrize(
    ("name", "width", "published"),
    [
        ("resnet18", 64, "resnet18"),
        ("mobilenet-v3-small", 16, "mobilenet_v3_small"),
        ("efficientnet-b0", 32, "efficientnet_b0"),
        ("vit", 24, None),
    ],
)
def test_the_published_network_is_that_of_torchvision(name: str, width: int, published: str | None) -> None:
    """By names, shapes and, with its weights, by the logits of its own output layer."""
    models = import_torchvision().models
    theirs = getattr(models, published)() if published else models.VisionTransformer(224, 16, 6, 6, 192, 768)
    net = built(name, Blueprint(1000, 224, width)).eval()
    named = {net.own_name(key): tensor for key, tensor in theirs.state_dict().items()}
    weights = {key: tensor for key, tensor in named.items() if key is not None}
    head = [module for module in theirs.modules() if isinstance(module, torch.nn.Linear)][-1]
    net.load_state_dict({**weights, "output.weight": head.weight, "output.bias": head.bias})
    batch = PIXELS(images(1, 224))
    with torch.inference_mode():
        assert torch.allclose(net(batch), theirs.eval()(batch), atol=1e-4)


@pytest.mark.parametrize(
    ("name", "blueprint", "message"),
    [
        ("cnn", Blueprint(5, 3, 2), "image-size = 3: with network = 'cnn', must be at least 4"),
        (
            "cnn",
            Blueprint(5, 8, 2, "imagenet"),
            "stem = 'imagenet': with network = 'cnn', which has none, must be auto",
        ),
        ("vit", Blueprint(5, 9, 2), "image-size = 9: .* multiple of the patches' size, 2"),
        ("vit", Blueprint(5, 8, 2, "imagenet"), "image-size = 8: .* multiple of the patches' size, 16"),
        ("mobilenet-v3-small", Blueprint(5, 7, 2), "image-size = 7: .* stem = 'cifar', must be at least 8"),
        ("efficientnet-b0", Blueprint(5, 16, 2, "imagenet"), "image-size = 16: .* must be at least 32"),
        ("resnet18", Blueprint(5, (13,), 2), r"network = 'resnet18': takes pictures, .*shape \(13,\); must be mlp$"),
        ("vit", Blueprint(5, (3, 20, 30), 2), r"network = 'vit': takes pictures, .*shape \(3, 20, 30\)"),
        ("cnn", Blueprint(5, (9, 50), 2), r"network = 'cnn': takes pictures, .*\(9, 50\); must be mlp or cnn1d"),
        ("cnn1d", Blueprint(5, 8, 2), r"network = 'cnn1d': takes series, .*shape \(3, 8, 8\)"),
        ("mlp", Blueprint(5, 8, 2, "imagenet"), "stem = 'imagenet': with network = 'mlp'"),
        ("resnet81", Blueprint(5, 8, 2), "network = 'resnet81': must be one of resnet18, .*did you mean resnet18"),
        ("timm:resnet81", Blueprint(5, 8, 2), "network = 'timm:resnet81': .*did you mean timm:resnet18, "),
        ("timm:resnet18.a9", Blueprint(5, 8, 2), r"network = 'timm:resnet18\.a9': .*did you mean timm:resnet18\.a"),
        ("timm:vit_tiny_patch16", Blueprint(5, 8, 2), "did you mean timm:vit_tiny_patch16_224, "),
        ("timm:hf-hub:some/model", Blueprint(5, 8, 2), r"must be timm: and a name of timm\.list_models"),
        ("timm:test_vit", Blueprint(5, 40, 2), "image-size = 40: .*multiple of the patches' size, 16, such as 32"),
        ("timm:test_resnet", Blueprint(5, (13,), 2), r"network = 'timm:test_resnet': takes pictures, .*\(13,\)"),
    ],
)
def test_what_a_network_cannot_take_is_refused_in_one_line(name: str, blueprint: Blueprint, message: str) -> None:
    if name.startswith("timm:"):
        need_modules("timm")
    with pytest.raises(ConfigError, match=message) as refusal:
        built(name, blueprint)
    assert "\n" not in str(refusal.value)
