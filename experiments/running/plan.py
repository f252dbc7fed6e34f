"""Dry run of a study: its runs, and an estimate of how long they would take."""

import time

import torch
from rich.console import Console
from rich.table import Table

from fedkace_flwr.config import Config
from fedkace_flwr.configured import configured
from fedkace_flwr.experiment import Experiment
from fedkace_flwr.experiments.running.cells import Cell
from fedkace_flwr.experiments.running.runner import check_study, show_missing, show_workers
from fedkace_flwr.experiments.running.workers import Workers
from fedkace_flwr.experiments.studies.study import Study
from fedkace_flwr.registry import METHODS
from fedkace_flwr.training.batches import samples_in_epoch
from fedkace_flwr.training.loop import predict, train
from fedkace_flwr.training.losses import TaskLoss

_BATCHES = 8


def show_plan(study: Study, console: Console) -> None:
    """Check a study as if to start it, time a few steps of each of its networks, and print its runs with estimates.

    Nothing is downloaded, and no folder of results is created.

    Raises
    ------
    FedkaceError
        As :func:`fedkace_flwr.experiments.running.runner.run_study` raises before it starts anything.
    """
    study, missing, workers = check_study(study, progress=console.is_terminal, download=False)
    speeds: dict[tuple[object, ...], tuple[float, float]] = {}
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in ("run", "state", "rounds", "training samples", "steps", "test images", "about"):
        table.add_column(heading, justify="left" if heading in ("run", "state") else "right")
    estimates: list[float] = []
    for name, asked in study.runs.items():
        config = configured(asked)[1]
        cell = Cell(name, asked, study.data[name])
        done = cell.finished
        begun = 0 if done else min(cell.begun, asked.stream.rounds)
        run, step = config.run, (config.training.augment, config.training.batch_size)
        network = (config.data, config.model, *step, run.precision, run.device, run.threads)
        if network not in speeds:
            speeds[network] = _calibrate(config, None if workers.gpus else 0.0)
        per_sample, per_image = speeds[network]
        samples, images = training_samples(config, begun), test_images(config, begun)
        estimate = samples * per_sample + images * per_image
        if study.engine == "flower":  # the clients of a run share the workers
            estimate /= min(at_once(workers), config.stream.clients)
        estimates += [] if done else [estimate]
        table.add_row(
            name,
            "finished" if done else "begun" if begun else "to do",
            str(config.stream.rounds - begun),
            f"{samples:,}",
            f"{samples // config.training.batch_size:,}",
            f"{images:,}",
            "-" if done else span(estimate),
        )
    console.print(table)
    seconds = sum(estimates)
    if study.engine == "inline":  # whole runs share the workers
        seconds = max([seconds / at_once(workers), *estimates])
    runs = "1 run" if len(study.runs) == 1 else f"{len(study.runs)} runs"
    console.print(
        f"{runs}, {'about ' if seconds >= 1 else ''}{span(seconds)} of training and testing on {workers.count} workers, if the machine is otherwise "
        "idle. Not included: selection, transport and method-specific messages.",
        highlight=False,
    )
    show_missing(missing, console)
    show_workers(study, workers, console)


def span(seconds: float) -> str:
    """Return a duration in a suitable unit, for example ``2.5 hours``."""
    for size, name in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {name}"
    return f"{seconds:.0f} seconds" if seconds >= 1 else "less than a second"


def at_once(workers: Workers) -> int:
    """Return how many workers compute at the same time: on a CPU, no more than there are cores for."""
    if workers.gpus:
        return workers.count
    return max(1, min(workers.count, workers.machine.cores // workers.threads))


def training_samples(config: Config, begun: int = 0) -> int:
    """Count the samples that a run trains on, over all clients and epochs, after the rounds that have been completed."""
    of, rounds = METHODS[config.method].samples or _chunk_and_buffer, range(begun + 1, config.stream.rounds + 1)
    return sum(of(config, number) for number in rounds) * config.training.epochs * config.stream.participants_per_round


def _chunk_and_buffer(config: Config, round_number: int) -> int:
    """Count the samples of an epoch over the chunk and, with methods that replay, a buffer that fills up to ``capacity``."""
    if not METHODS[config.method].replays:
        return config.mean_chunk
    held = min(config.buffer.capacity, (round_number - 1) * config.mean_chunk)
    return samples_in_epoch(config.training.batching, config.mean_chunk, held)


def test_images(config: Config, begun: int = 0) -> int:
    """Return the largest number of test images that a run can evaluate, each counted once per model tested.

    Those of the rounds that have been completed are left out.
    With ``predict-with = prequential`` these are also the images of each chunk after the first.
    """
    experiment = Experiment(config)
    models = _models_tested(config)
    of_chunks = configured(config)[1].answers.predict_with == "prequential"
    total = 0
    for client in range(config.stream.clients):
        seen = torch.zeros(experiment.dataset.num_classes, dtype=torch.bool)
        for number in range(1, config.stream.rounds + 1):
            if experiment.trains(client, number):
                chunk = experiment.chunk(client, number)
                if number > begun and of_chunks and bool(seen.any()):
                    total += models * len(chunk)
                seen |= chunk.class_counts(len(seen)) > 0
            if number > begun:
                total += models * len(experiment.test_set(client, seen))
    return total


def _models_tested(config: Config) -> int:
    """Return the largest number of models that a client tests in a round; a mirrored view counts as one."""
    method, config = configured(config)
    answers = config.answers
    mirrored = answers.test_time_augmentation == "mirrored"
    if answers.averages:
        return 2 + mirrored
    return max(method.tests, 2 if answers.evaluate == "both" else 1) + mirrored


def _calibrate(config: Config, share: float | None) -> tuple[float, float]:
    """Return the seconds per training sample and per test image on this machine; with a share of 0 on its CPU."""
    if config.run.threads:
        torch.set_num_threads(config.run.threads)
    experiment = Experiment(config, share=share)
    net = experiment.network(experiment.initial_weights())
    chunk = experiment.drawn(0, 1)
    rows = torch.arange(_BATCHES * config.training.batch_size) % len(chunk)
    images, labels = chunk.take(rows).images(experiment.dataset.fetch), chunk.labels[rows] % experiment.num_classes
    seen = torch.ones(experiment.num_classes, dtype=torch.bool, device=experiment.device)
    once = range(1)
    alone = experiment.device.type == "cpu" and config.run.threads == 1
    clock = time.process_time if alone else time.perf_counter  # process time ignores the work of other processes

    def step(part: slice) -> None:
        data, none = (images[part], labels[part]), (images[:0], labels[:0])
        order, changes = torch.Generator().manual_seed(0), torch.Generator().manual_seed(0)
        objective = TaskLoss(seen, seen)
        preprocess = experiment.preprocess
        train(net, data, none, objective, config.training, preprocess, order, epochs=once, augmentation=changes)

    step(slice(config.training.batch_size))  # warm up
    begun = clock()
    step(slice(None))
    trained = clock()
    predict(net, torch.Tensor.clone, images, experiment.preprocess)
    return (trained - begun) / len(rows), (clock() - trained) / len(rows)
