"""Random changes of training images."""

import torch

from fedkace_flwr.training.augmentation import FlipShift

CPU = torch.device("cpu")


def pictures(samples: int, height: int, width: int) -> torch.Tensor:
    """Images in which every pixel's value tells its row and column, uint8 (n, H, W, 3)."""
    rows = torch.arange(height).view(1, -1, 1).expand(samples, -1, width)
    columns = torch.arange(width).view(1, 1, -1).expand(samples, height, -1)
    numbers = torch.arange(samples).view(-1, 1, 1).expand(-1, height, width)
    return torch.stack([rows, columns, numbers], dim=3).to(torch.uint8)


def changed(seed: int, samples: int = 200, height: int = 16, width: int = 24) -> tuple[torch.Tensor, FlipShift]:
    changes = FlipShift(samples, height, width, CPU, torch.Generator().manual_seed(seed))
    changes.draw()
    return changes(pictures(samples, height, width), torch.arange(samples)).long(), changes


def test_each_image_is_shifted_by_up_to_an_eighth_and_half_of_them_are_mirrored() -> None:
    images, _ = changed(1)
    rows, columns, numbers = images.unbind(dim=3)
    assert (numbers == torch.arange(200).view(-1, 1, 1)).all(), "samples stay in their places"
    assert (rows == rows[:, :, :1]).all() and (columns == columns[:, :1]).all(), "rows and columns stay straight"
    down = rows[:, 8, 0] - 8
    assert set(down.tolist()) == {-2, -1, 0, 1, 2}
    rising = columns[:, 0, 13] > columns[:, 0, 10]
    assert 0.4 < float(rising.float().mean()) < 0.6
    right = torch.where(rising, columns[:, 0, 11] - 11, columns[:, 0, 11] - 12)
    assert set(right.tolist()) == {-3, -2, -1, 0, 1, 2, 3}


def test_the_edge_is_repeated_where_an_image_has_moved_away() -> None:
    images, _ = changed(2)
    rows = images[:, :, 0, 0]
    moved = rows[rows[:, 8] == 6]  # down by two
    assert len(moved) and (moved[:, :3] == 0).all() and (moved[:, 3] == 1).all()


def test_every_epoch_draws_anew_and_the_generator_decides() -> None:
    first, changes = changed(3)
    again, _ = changed(3)
    assert torch.equal(first, again)
    changes.draw()
    assert not torch.equal(first, changes(pictures(200, 16, 24), torch.arange(200)).long())


def test_a_batch_takes_the_changes_of_its_samples() -> None:
    images, changes = changed(4)
    positions = torch.tensor([7, 3, 7, 199])
    assert torch.equal(changes(pictures(200, 16, 24), positions).long(), images[positions])


def test_images_too_small_to_shift_are_mirrored_alone() -> None:
    images, _ = changed(5, height=7, width=7)
    assert (images[:, :, 0, 0] == torch.arange(7)).all()
    assert {tuple(row) for row in images[:, 0, :, 1].tolist()} == {tuple(range(7)), tuple(range(6, -1, -1))}
