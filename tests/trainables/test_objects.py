"""Tokens on an object store. The store is a folder of this machine, by its `file://`; `moto` stands for S3 if it is
installed, as a server of its own."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from service.errors import InputError
from service.problem import Problem
from service.record.dataset import dataset
from service.spec import parse_spec
from tests.conftest import free_port
from tests.trainables.test_data import write_indexed
from trainables.data import DataError, MissingDataError, located, open_tokens
from trainables.objects import cache, fetch

SEQUENCES = [[i % 250 for i in range(5000)]]


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that stands for a bucket; copies lie beside it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (bucket := tmp_path / "bucket").mkdir()
    write_indexed(bucket / "corpus", SEQUENCES, "uint16")
    return bucket


def copies() -> list[Path]:
    return [path for path in cache().iterdir() if path.is_dir()]


@pytest.mark.parametrize("ending", ["", ".bin", ".idx"])
def test_a_pair_of_objects_reads_as_its_files_do(bucket: Path, ending: str) -> None:
    stream = open_tokens(f"{bucket.as_uri()}/corpus{ending}", 1000)
    assert len(stream) == 5000
    assert list(stream.sequence(1, 9)) == list(range(9, 19))
    assert stream.digest() == open_tokens(bucket / "corpus", 1000).digest()


@pytest.mark.parametrize("name", ["tokens.npy", "tokens.bin"])
def test_so_does_a_single_object(bucket: Path, name: str) -> None:
    tokens = np.arange(1000, dtype="<u2")
    np.save(bucket / name, tokens) if name.endswith(".npy") else tokens.tofile(bucket / name)
    assert list(open_tokens(f"{bucket.as_uri()}/{name}", 1000).sequence(0, 3)) == [0, 1, 2, 3]


def test_what_was_copied_is_not_copied_again_unless_it_changed(bucket: Path) -> None:
    source = f"{bucket.as_uri()}/corpus"
    first = fetch(source)
    made = first.with_suffix(".bin").stat().st_ino
    assert fetch(source) == first
    assert first.with_suffix(".bin").stat().st_ino == made
    write_indexed(bucket / "corpus", [[7] * 50], "uint16")
    assert len(open_tokens(source, 1000)) == 50
    assert len(copies()) == 2, "who reads the old one goes on"


def test_of_many_at_once_one_copies_and_all_read(bucket: Path) -> None:
    program = f"from trainables.objects import fetch; print(fetch('{bucket.as_uri()}/corpus'))"
    begun = [subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert len({one.communicate()[0] for one in begun}) == 1
    assert [one.returncode for one in begun] == [0, 0, 0]
    assert len(copies()) == 1


def test_what_a_killed_copy_left_is_no_copy(bucket: Path) -> None:
    source = f"{bucket.as_uri()}/corpus"
    copy = fetch(source).parent
    part = copy.with_suffix(".part")
    copy.rename(part)
    (part / "corpus.bin").write_bytes(b"")
    assert len(open_tokens(source, 1000)) == 5000
    assert not part.exists()


@pytest.mark.parametrize(
    ("name", "error", "said"),
    [
        ("nothing", MissingDataError, "there is no such object, with the ending .bin or without: {}"),
        ("nothing.npy", MissingDataError, "there is no such object, with the ending .bin or without: {}"),
        ("corpus.idx", DataError, "has 9998 bytes, but"),
    ],
)
def test_what_cannot_be_read_is_told_in_a_line(bucket: Path, name: str, error: type[DataError], said: str) -> None:
    (bucket / "corpus.bin").write_bytes((bucket / "corpus.bin").read_bytes()[:-2])
    with pytest.raises(error) as raised:
        open_tokens(source := f"{bucket.as_uri()}/{name}", 1000)
    assert said.format(source) in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("source", ["ftp://host/corpus", "s3://", "gs://\0"])
def test_a_uri_of_no_store_is_told_in_a_line(source: str) -> None:
    with pytest.raises(DataError, match=r"^cannot read ") as raised:
        open_tokens(source, 1000)
    assert "\n" not in str(raised.value)


def test_a_full_disk_leaves_no_copy(bucket: Path) -> None:
    cache().mkdir(parents=True)
    cache().chmod(0o500)
    if os.access(cache(), os.W_OK):  # root may
        shutil.rmtree(cache())
        cache().write_text("no folder")
    with pytest.raises(DataError, match=r"^cannot read "):
        open_tokens(f"{bucket.as_uri()}/corpus", 1000)


def spec(data: str) -> Problem:
    cluster = "{gpus_per_node: 2, accelerator: cpu}"
    return parse_spec(
        f"name: a\nmodel: tiny-llama\ndata: {data}\nsequence_length: 32\nglobal_batch_size: 8\ncluster: {cluster}\n"
    )


def test_a_spec_names_it_as_it_is_and_its_record_says_where_it_lies(bucket: Path) -> None:
    assert located("s3://bucket/corpus", "/somewhere") == "s3://bucket/corpus"
    assert spec("s3://bucket/corpus").located().data == "s3://bucket/corpus"
    recorded = dataset(spec(f"{bucket.as_uri()}/corpus"))
    assert recorded is not None
    assert (recorded.dataset.name, recorded.dataset.source_type) == ("corpus", "file")


def test_a_password_is_refused_and_not_repeated() -> None:
    with pytest.raises(InputError, match="environment is its place") as raised:
        spec("s3://key:verysecret@bucket/corpus")
    assert "verysecret" not in str(raised.value)


@pytest.mark.slow
def test_tokens_come_from_s3(bucket: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("moto.server", reason="no server that speaks S3 is installed")
    import boto3

    port = free_port()
    server = subprocess.Popen([sys.executable, "-m", "moto.server", "-p", str(port)], stderr=subprocess.DEVNULL)
    try:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(name, "testing")
        deadline = time.monotonic() + 60
        while socket.socket().connect_ex(("127.0.0.1", port)):
            assert time.monotonic() < deadline
            time.sleep(0.5)
        client = boto3.client("s3", endpoint_url=f"http://127.0.0.1:{port}", region_name="us-east-1")
        client.create_bucket(Bucket="tokens")
        for ending in (".bin", ".idx"):
            client.upload_file(str(bucket / f"corpus{ending}"), "tokens", f"some/corpus{ending}")
        source = f"s3://tokens/some/corpus?scheme=http&endpoint_override=127.0.0.1:{port}&region=us-east-1"
        assert list(open_tokens(source, 1000).sequence(1, 9)) == list(range(9, 19))
    finally:
        server.kill()
        server.wait(10)
