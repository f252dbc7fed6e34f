"""Data sets of image files: ImageNet-100 and folders of one's own."""

import logging
import os
import shutil
import struct
import tarfile
import time
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import ExifTags, Image
from support.made.datasets import DATA_DIR, assert_consistent, needs, write_picture

from fedkace_flwr.compute.torchvision_compat import import_torchvision
from fedkace_flwr.data import pixels
from fedkace_flwr.data.datasets import load_dataset
from fedkace_flwr.errors import ConfigError, DataError
from fedkace_flwr.sections import DataConfig

COMPOSED, DECOMPOSED = "caf\u00e9", "cafe\u0301"


def test_imagenet_classes_and_proportional_split(imagenet: DataConfig, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        dataset = load_dataset(imagenet)
    assert_consistent(dataset)
    assert dataset.class_names == ("n01", "n02", "n10")
    assert dataset.train_size == 30 and len(dataset.labels) == 39
    assert caplog.text.count("n10 (13)") == 1
    grey, coloured = dataset.images[dataset.train_ids(0)[3]], dataset.images[dataset.train_ids(0)[2]]
    assert (grey == grey[:1]).all() and not (coloured == coloured[:1]).all()


def test_imagenet_images_are_resized_and_cropped_like_torchvision(imagenet: DataConfig) -> None:
    transforms = import_torchvision().transforms
    for shape in ((40, 30), (31, 57), (18, 18), (100, 9)):
        write_picture(Path(imagenet.data_dir) / "train" / "n01" / "n01_00.JPEG", shape)
        dataset = load_dataset(imagenet)
        prepare = transforms.Compose([transforms.Resize(round(16 * 256 / 224)), transforms.CenterCrop(16)])
        for label, name, row in ((0, "n01_00", 0), (1, "n02_04", 4), (2, "n10_09", 9)):
            path = Path(imagenet.data_dir) / "train" / dataset.class_names[label] / f"{name}.JPEG"
            expected = np.asarray(prepare(Image.open(path).convert("RGB"))).transpose(2, 0, 1)
            np.testing.assert_array_equal(dataset.images[dataset.train_ids(label)[row]], expected)


def test_imagenet_takes_the_first_1300_of_a_synset(imagenet: DataConfig, caplog: pytest.LogCaptureFixture) -> None:
    train = Path(imagenet.data_dir) / "train"
    for i in range(1310):
        os.link(train / "n02" / "n02_00.JPEG", train / "n01" / f"n01_{100 + i:04d}.JPEG")
    dataset = load_dataset(replace(imagenet, num_classes=1))
    assert len(dataset.train_ids(0)) == 1000 and len(dataset.test_ids(0)) == 300
    assert "fewer than 1300" not in caplog.text


def test_imagenet_without_a_train_folder(imagenet: DataConfig) -> None:
    direct = load_dataset(replace(imagenet, data_dir=str(Path(imagenet.data_dir) / "train")))
    assert direct.class_names == ("n01", "n02", "n10")


def test_imagenet_needs_its_synsets(imagenet: DataConfig) -> None:
    (Path(imagenet.data_dir) / "train" / "not-a-synset").mkdir()
    with pytest.raises(DataError, match="3 synset folders, expected 100"):
        load_dataset(replace(imagenet, num_classes=0))
    assert load_dataset(replace(imagenet, num_classes=2)).class_names == ("n01", "n02")
    assert load_dataset(replace(imagenet, num_classes=2, first_class=1)).class_names == ("n02", "n10")


def test_imagenet_class_with_a_single_image(imagenet: DataConfig) -> None:
    synset = Path(imagenet.data_dir) / "train" / "n02"
    for path in sorted(synset.iterdir())[2:]:
        path.unlink()
    dataset = load_dataset(imagenet)
    assert (len(dataset.train_ids(1)), len(dataset.test_ids(1))) == (1, 1)
    (synset / "n02_00.JPEG").unlink()
    with pytest.raises(DataError, match=f"{synset}: 1 images .*at least 2"):
        load_dataset(imagenet)


@pytest.mark.parametrize("damage", ["truncated", "not an image"])
def test_damaged_jpeg_is_named(damage: str, imagenet: DataConfig) -> None:
    path = Path(imagenet.data_dir) / "train" / "n02" / "n02_07.JPEG"
    path.write_bytes({"truncated": path.read_bytes()[:400], "not an image": b"<html>"}[damage])
    with pytest.raises(DataError, match=f"^{path}: damaged"):
        load_dataset(imagenet)


def test_changed_files_are_prepared_anew(imagenet: DataConfig) -> None:
    before = load_dataset(imagenet)
    path = Path(imagenet.data_dir) / "train" / "n01" / "n01_00.JPEG"
    write_picture(path, seed=77)
    os.utime(path, ns=(time.time_ns(), time.time_ns() + 1))
    after = load_dataset(imagenet)
    assert not np.array_equal(before.images[0], after.images[0])
    np.testing.assert_array_equal(before.images[1:], after.images[1:])


@needs("imagenet100-samples")
def test_real_imagenet_files(tmp_path: Path) -> None:
    samples = sorted((DATA_DIR / "imagenet100-samples" / "train").glob("*/*.JPEG"))
    grey = [path for path in samples if Image.open(path).mode == "L"]
    assert grey, "the samples should hold a greyscale file"
    chosen = sorted({path.parent.name: path for path in [*samples[:4], grey[0]]}.items())
    for synset, path in chosen:
        (tmp_path / "train" / synset).mkdir(parents=True)
        for i in range(3):
            shutil.copy(path, tmp_path / "train" / synset / f"{i}.JPEG")
    config = DataConfig("imagenet100", str(tmp_path), num_classes=len(chosen))
    dataset = load_dataset(config)
    assert_consistent(dataset)
    assert dataset.image_size == 224 and dataset.class_names == tuple(synset for synset, _ in chosen)
    prepared = dataset.images[dataset.test_ids(dataset.class_names.index(grey[0].parent.name))[0]]
    assert (prepared == prepared[:1]).all() and prepared.std() > 5


@pytest.mark.parametrize("held_out", ["val", "test"])
def test_folder_split_and_order(held_out: str, folder: DataConfig) -> None:
    root = Path(folder.data_dir)
    (root / "val").rename(root / held_out)
    (root / "train" / "dog" / "notes.txt").write_text("not an image")
    dataset = load_dataset(folder)
    assert_consistent(dataset)
    assert dataset.class_names == ("cat", "dog")
    assert dataset.train_size == 10 and len(dataset.labels) == 14
    path = root / held_out / "dog" / "dog_01.JPEG"
    picture = Image.open(path).resize((16, 12), Image.Resampling.BILINEAR).crop((2, 0, 14, 12))
    np.testing.assert_array_equal(dataset.images[13], np.asarray(picture).transpose(2, 0, 1))


def test_folder_classes_are_counted(folder: DataConfig) -> None:
    assert load_dataset(replace(folder, num_classes=1)).class_names == ("cat",)
    with pytest.raises(ConfigError, match=r"^num-classes = 3: data set folder has 2 classes$"):
        load_dataset(replace(folder, num_classes=3))


def test_folder_splits_with_different_classes(folder: DataConfig) -> None:
    root = Path(folder.data_dir)
    (root / "val" / "dog").rename(root / "val" / "wolf")
    with pytest.raises(DataError, match=f"{root}/val lacks dog; {root}/train lacks wolf"):
        load_dataset(folder)


def test_folder_without_images_or_splits(folder: DataConfig, tmp_path: Path) -> None:
    root = Path(folder.data_dir)
    shutil.rmtree(root / "train" / "dog")
    (root / "train" / "dog").mkdir()
    with pytest.raises(DataError, match=f"{root}/train/dog: 0 images"):
        load_dataset(folder)
    with pytest.raises(DataError, match=f"{tmp_path}/nowhere/train: cannot be read .*data-dir"):
        load_dataset(replace(folder, data_dir=str(tmp_path / "nowhere")))
    with pytest.raises(DataError, match=f"{tmp_path}/nowhere: cannot be read .*data-dir"):
        load_dataset(replace(folder, dataset="imagenet100", data_dir=str(tmp_path / "nowhere")))


def test_of_two_held_out_folders_test_is_taken_and_the_other_named(
    folder: DataConfig, caplog: pytest.LogCaptureFixture
) -> None:
    root = Path(folder.data_dir)
    alone = load_dataset(folder)
    shutil.copytree(root / "val", root / "test")
    (root / "val" / "cat").rename(root / "val" / "cow")
    both = load_dataset(folder)
    assert f"{root}/val is not used" in caplog.text
    np.testing.assert_array_equal(both.images, alone.images)


def test_the_name_of_a_class_must_be_utf_8(folder: DataConfig) -> None:
    (Path(folder.data_dir) / "train" / os.fsdecode(b"caf\xe9")).mkdir()
    with pytest.raises(DataError, match=r"/train: the folder caf\\udce9 names a class; its name must be UTF-8"):
        load_dataset(folder)


def test_a_folder_without_a_test_split_is_split_by_class(folder: DataConfig) -> None:
    root = Path(folder.data_dir)
    before = load_dataset(folder)
    (root / "val").rename(root / "valid")
    with pytest.raises(DataError, match=rf"^{root}: has valid; should hold train/<class>/<image> and perhaps test/"):
        load_dataset(folder)
    shutil.rmtree(root / "valid")
    dataset = load_dataset(folder)
    assert_consistent(dataset)
    np.testing.assert_array_equal(dataset.images, before.images[:10])
    assert [len(dataset.test_ids(label)) for label in range(2)] == [1, 1]
    write_picture(root / "train" / "eel" / "only.png")
    with pytest.raises(DataError, match=f"^{root}/train/eel: 1 images .*, expected at least 2"):
        load_dataset(folder)


def test_pictures_below_the_folder_of_a_class_are_its_own(folder: DataConfig) -> None:
    """Half of a class in a folder within its own, or under a rarer suffix."""
    before = load_dataset(folder)
    cat = Path(folder.data_dir) / "train" / "cat"
    (cat / "more" / "still").mkdir(parents=True)
    (cat / "cat_03.JPEG").rename(cat / "more" / "cat_03.jfif")
    (cat / "cat_04.JPEG").rename(cat / "more" / "still" / "cat_04.JPEG")
    np.testing.assert_array_equal(load_dataset(folder).images, before.images)


def test_what_is_not_taken_is_counted_and_named(folder: DataConfig, caplog: pytest.LogCaptureFixture) -> None:
    cat = Path(folder.data_dir) / "train" / "cat"
    (cat / "more").mkdir()
    write_picture(cat.parent / "of_no_class.jpg")
    for name in ("a.heic", "more/b.txt", ".hidden.txt", "Z.AVIF"):
        (cat / name).write_text("no image of a kind that is read")
    os.mkfifo(cat / "pipe.png")
    (cat / "gone.png").symlink_to("nowhere")
    with caplog.at_level(logging.WARNING):
        assert load_dataset(folder).train_size == 10
    (told,) = [record.getMessage() for record in caplog.records]
    assert "left out: 6 entries" in told and f"{cat}/Z.AVIF" in told
    caplog.clear()
    load_dataset(folder)
    assert not caplog.records


def test_what_systems_and_archivers_leave_is_no_class_and_no_picture(folder: DataConfig) -> None:
    before = load_dataset(folder)
    root = Path(folder.data_dir)
    for place in ("train/__MACOSX", "val/@eaDir", "train/lost+found", "train/cat/@eaDir/cat_00.JPEG"):
        write_picture(root / place / "SYNOPHOTO_THUMB_M.jpg")
    dataset = load_dataset(folder)
    assert dataset.class_names == ("cat", "dog")
    np.testing.assert_array_equal(dataset.images, before.images)


def test_a_class_is_the_same_however_its_name_is_composed(folder: DataConfig) -> None:
    root = Path(folder.data_dir)
    (root / "train" / "cat").rename(root / "train" / COMPOSED)
    (root / "val" / "cat").rename(root / "val" / DECOMPOSED)
    assert load_dataset(folder).class_names == (COMPOSED, "dog")
    write_picture(root / "train" / DECOMPOSED / "x.png")
    dataset = load_dataset(folder)
    assert len(dataset.train_ids(dataset.class_names.index(COMPOSED))) == 6


def test_warnings_about_a_picture_name_its_file(folder: DataConfig, caplog: pytest.LogCaptureFixture) -> None:
    path = Path(folder.data_dir) / "train" / "dog" / "odd.jpg"
    Image.new("RGB", (12, 12)).save(path, exif=b"Exif\0\0II*\0\xff\xff\xff\xff")
    with caplog.at_level(logging.WARNING), warnings.catch_warnings():
        warnings.simplefilter("error")
        load_dataset(folder)
    assert any(record.getMessage().startswith(f"{path}: ") for record in caplog.records)


def test_formats_that_predictions_refuse_are_named(folder: DataConfig, caplog: pytest.LogCaptureFixture) -> None:
    Image.new("RGB", (12, 12)).save(Path(folder.data_dir) / "val" / "dog" / "x.BMP")
    with caplog.at_level(logging.WARNING):
        load_dataset(folder)
    (told,) = [record.getMessage() for record in caplog.records]
    assert ".bmp files, too" in told


def tiff(greys: np.ndarray, bits: int, packed: bytes) -> bytes:
    """A greyscale TIFF file, uncompressed."""
    height, width = greys.shape
    tags = ((256, width), (257, height), (258, bits), (259, 1), (262, 1), (273, 110), (278, height), (279, len(packed)))
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags)
    return b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + bytes(4) + packed


def test_greys_of_more_than_8_bits_are_scaled(folder: DataConfig) -> None:
    greys = np.arange(144, dtype=np.uint16).reshape(12, 12) * 28  # in 12 bits
    place = Path(folder.data_dir) / "train" / "cat"
    for name, kind in (("a.png", "PNG"), ("b.tiff", "TIFF")):
        Image.fromarray(greys << 4).save(place / name, kind)
    (place / "c.ppm").write_bytes(b"P5 12 12 65535\n" + (greys << 4).astype(">u2").tobytes())
    pairs = greys.reshape(-1, 2).astype(np.uint32)
    packed = pairs[:, 0] << 12 | pairs[:, 1]
    triples = np.stack([packed >> 16, packed >> 8 & 255, packed & 255], axis=1).astype(np.uint8).tobytes()
    (place / "b2.tif").write_bytes(tiff(greys, 12, triples))
    dataset = load_dataset(folder)
    for row in range(4):
        np.testing.assert_array_equal(dataset.images[row], np.stack([greys >> 4] * 3))


@pytest.mark.parametrize("kind", ["JPEG", "TIFF"])
def test_pictures_are_turned_as_their_camera_was_held(kind: str, folder: DataConfig) -> None:
    path = Path(folder.data_dir) / "train" / "cat" / f"a.{kind.lower()}"
    left_red = Image.new("RGB", (24, 12))
    left_red.paste((255, 0, 0), (0, 0, 12, 12))
    orientation = Image.Exif()
    orientation[ExifTags.Base.Orientation] = 6
    left_red.save(path, kind, exif=orientation)
    red = load_dataset(folder).images[0][0]
    assert (red[:5] > 200).all() and (red[-5:] < 55).all()


def test_pixels_of_unknown_range_are_refused(folder: DataConfig) -> None:
    path = Path(folder.data_dir) / "train" / "dog" / "a.tiff"
    Image.new("F", (12, 12)).save(path)
    with pytest.raises(DataError, match=f"^{path}: its pixels have Pillow's mode F, .*; convert or remove it$"):
        load_dataset(folder)


def test_a_copy_that_was_prepared_from_other_pixels_is_not_used(
    folder: DataConfig, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_dataset(folder)
    with monkeypatch.context() as patch:
        patch.setattr(pixels, "READING", pixels.READING + 1)
        load_dataset(folder)
    assert len([each for each in cache.iterdir() if each.is_dir()]) == 2


@pytest.mark.slow
@needs("tiny-imagenet-100.tar.xz")
def test_real_image_folder(tmp_path: Path) -> None:
    with tarfile.open(DATA_DIR / "tiny-imagenet-100.tar.xz") as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # early releases of Python 3.11 have none
        members = archive.getmembers()
        class_of = {member: "".join(member.name.split("/")[2:3]) for member in members}  # split/class/picture
        classes = sorted(set(class_of.values()) - {""})[:10]
        archive.extractall(tmp_path, [member for member in members if class_of[member] in classes])
    root = tmp_path / "tiny-imagenet-100"
    dataset = load_dataset(DataConfig("folder", str(root)))
    assert_consistent(dataset)
    assert dataset.images.shape == (1500, 3, 64, 64) and dataset.train_size == 1000
    assert {len(dataset.test_ids(label)) for label in range(10)} == {50}
    path = sorted((root / "train" / dataset.class_names[7]).iterdir())[3]
    expected = np.asarray(Image.open(path).convert("RGB")).transpose(2, 0, 1)  # native size: not resampled
    np.testing.assert_array_equal(dataset.images[dataset.train_ids(7)[3]], expected)
