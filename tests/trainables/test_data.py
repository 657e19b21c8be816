"""Tokens: what is written is read back, by us and by a reader written from the format alone, and damage is refused."""

from __future__ import annotations

import os
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainables.data import BYTE_VOCAB_SIZE, END_OF_DOCUMENT, DataError, open_tokens, prepare

DTYPE_CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "float64": 6, "float32": 7, "uint16": 8}


def read_indexed(prefix: Path) -> tuple[list[list[int]], list[int]]:
    """(sequences, document indices), byte by byte as the format says."""
    index, data = Path(f"{prefix}.idx").read_bytes(), Path(f"{prefix}.bin").read_bytes()
    assert index[:9] == b"MMIDIDX\x00\x00"
    assert struct.unpack_from("<Q", index, 9) == (1,)
    item = {1: "B", 3: "h", 4: "i", 5: "q", 8: "H"}[index[17]]
    sequences, documents = struct.unpack_from("<QQ", index, 18)
    lengths = struct.unpack_from(f"<{sequences}i", index, 34)
    pointers = struct.unpack_from(f"<{sequences}q", index, 34 + 4 * sequences)
    document_indices = struct.unpack_from(f"<{documents}q", index, 34 + 12 * sequences)
    assert len(index) == 34 + 12 * sequences + 8 * documents
    assert len(data) == sum(lengths) * struct.calcsize(item)
    return [
        list(struct.unpack_from(f"<{length}{item}", data, at)) for length, at in zip(lengths, pointers, strict=True)
    ], list(document_indices)


def write_indexed(prefix: Path, sequences: list[list[int]], dtype: str) -> None:
    """An indexed dataset of one document a sequence, byte by byte as the format says."""
    item = {"uint8": "B", "int16": "h", "int32": "i", "int64": "q", "float32": "f", "uint16": "H"}[dtype]
    lengths = [len(s) for s in sequences]
    pointers = [sum(lengths[:k]) * struct.calcsize(item) for k in range(len(lengths))]
    Path(f"{prefix}.bin").write_bytes(b"".join(struct.pack(f"<{len(s)}{item}", *s) for s in sequences))
    Path(f"{prefix}.idx").write_bytes(
        b"MMIDIDX\x00\x00"
        + struct.pack("<QBQQ", 1, DTYPE_CODES[dtype], len(sequences), len(sequences) + 1)
        + struct.pack(f"<{len(lengths)}i", *lengths)
        + struct.pack(f"<{len(pointers)}q", *pointers)
        + struct.pack(f"<{len(lengths) + 1}q", *range(len(lengths) + 1))
    )


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Prefix of a good indexed dataset: 5 000 uint16 tokens below 1 000."""
    write_indexed(tmp_path / "corpus", [[i % 1000 for i in range(5000)]], "uint16")
    return tmp_path / "corpus"


def damage(path: Path, at: int, new: bytes) -> None:
    old = path.read_bytes()
    path.write_bytes(old[:at] + new + old[at + len(new) :])


@given(texts=st.lists(st.text(st.characters(codec="utf-8"), max_size=50), min_size=1, max_size=8))
@settings(max_examples=50, deadline=None)
def test_prepared_documents_come_back_whole(texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("texts")
    for i, text in enumerate(texts):
        (folder / f"{i}.txt").write_bytes(text.encode())
    documents = [[*text.encode(), END_OF_DOCUMENT] for text in texts if text]
    if not documents:
        with pytest.raises(DataError, match=r"no text to tokenise: \d files were empty"):
            prepare([folder], folder / "out")
        return

    prepared = prepare([folder], folder / "out")

    tokens = [token for document in documents for token in document]
    assert (prepared.documents, prepared.tokens) == (len(documents), len(tokens))
    assert prepared.skipped_files == len(texts) - len(documents)
    assert read_indexed(prepared.prefix) == (documents, list(range(len(documents) + 1)))
    stream = open_tokens(prepared.prefix, BYTE_VOCAB_SIZE)
    assert stream.sequence(0, len(tokens) - 1).tolist() == tokens


@pytest.mark.parametrize("dtype", ["uint8", "int16", "int32", "int64", "uint16"])
@pytest.mark.parametrize("suffix", ["", ".bin", ".idx"])
def test_indexed_dataset_of_each_dtype_and_name(tmp_path: Path, dtype: str, suffix: str) -> None:
    write_indexed(tmp_path / "v1.0", [[5, 6, 7], [8], [9, 10]], dtype)
    stream = open_tokens(f"{tmp_path / 'v1.0'}{suffix}", vocab_size=11)
    assert len(stream) == 6
    assert stream.sequence(0, 5).tolist() == [5, 6, 7, 8, 9, 10]


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_numpy_array(tmp_path: Path, dtype: type[np.unsignedinteger]) -> None:
    np.save(tmp_path / "tokens.npy", np.arange(100, dtype=dtype))
    assert open_tokens(tmp_path / "tokens.npy", 100).sequence(3, 10).tolist() == list(range(30, 41))


def test_raw_uint16(tmp_path: Path) -> None:
    np.arange(100, dtype="<u2").tofile(tmp_path / "tokens.bin")
    assert open_tokens(tmp_path / "tokens.bin", 100).sequence(3, 10).tolist() == list(range(30, 41))


def test_samples_share_one_token_and_wrap_around(tmp_path: Path) -> None:
    np.save(tmp_path / "tokens.npy", np.arange(12, dtype=np.uint16))
    stream = open_tokens(tmp_path / "tokens.npy", 12)
    assert stream.num_samples(5) == 2
    assert [stream.sequence(i, 5).tolist() for i in range(3)] == [
        [0, 1, 2, 3, 4, 5],
        [5, 6, 7, 8, 9, 10],
        [0, 1, 2, 3, 4, 5],
    ]


def test_a_sample_is_the_caller_s_own_int64(corpus: Path) -> None:
    stream = open_tokens(corpus, 1000)
    sample = stream.sequence(0, 4)
    assert type(sample) is np.ndarray
    assert sample.dtype == np.int64
    sample[:] = 7
    assert stream.sequence(0, 4).tolist() == [0, 1, 2, 3, 4]


def test_shorter_than_one_sample(corpus: Path) -> None:
    stream = open_tokens(corpus, 1000)
    assert len(stream.sequence(0, 4999)) == 5000
    with pytest.raises(DataError, match="holds 5000 tokens; one sample of sequence length 5000 takes 5001"):
        stream.sequence(0, 5000)


def test_files_are_mapped_and_not_loaded(tmp_path: Path) -> None:
    tokens = 2**32
    with (tmp_path / "sparse.bin").open("wb") as stream:
        stream.truncate(2 * tokens)
    tracemalloc.start()
    try:
        stream_of_zeros = open_tokens(tmp_path / "sparse.bin", 10)
        last = stream_of_zeros.sequence(stream_of_zeros.num_samples(1024) - 1, 1024)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(stream_of_zeros) == tokens
    assert not last.any()
    assert peak < 64 * 2**20


def test_a_digest_is_of_the_tokens_wherever_and_however_they_are_kept(corpus: Path, tmp_path: Path) -> None:
    tokens = np.arange(5000) % 1000
    np.save(tmp_path / "same.npy", tokens.astype(np.int32))
    np.save(tmp_path / "longer.npy", np.append(tokens, 0))
    tokens[2500] += 1
    np.save(tmp_path / "other.npy", tokens)
    indexed, same, longer, other = (
        open_tokens(path, 1001).digest()
        for path in (corpus, *(tmp_path / f"{n}.npy" for n in ("same", "longer", "other")))
    )
    assert indexed == same
    assert len({indexed, longer, other, open_tokens("synthetic", 1001).digest()}) == 4
    assert open_tokens("synthetic", 1001).digest() == open_tokens("synthetic", 1001).digest()
    assert all(len(digest) == 8 for digest in (indexed, longer, other))


def test_synthetic_is_deterministic_inside_the_vocabulary_and_skewed() -> None:
    stream, again = open_tokens("synthetic", 1000), open_tokens("synthetic", 1000)
    sample = stream.sequence(7, 100_000)
    assert np.array_equal(sample, again.sequence(7, 100_000))
    assert sample[0] == stream.sequence(6, 100_000)[-1]
    assert not np.array_equal(sample, stream.sequence(8, 100_000))
    assert sample.min() >= 0
    assert sample.max() < 1000
    # token < 125 where u < 1/2
    assert np.mean(sample < 125) == pytest.approx(0.5, abs=0.01)


def test_token_outside_the_vocabulary_in_the_checked_sample(corpus: Path) -> None:
    with pytest.raises(DataError, match="token 999 at position 999 is outside the model's vocabulary of 999"):
        open_tokens(corpus, 999)


@pytest.mark.parametrize("position", [0, 2_500_000, 4_999_999])
def test_beginning_middle_and_end_are_checked(tmp_path: Path, position: int) -> None:
    tokens = np.zeros(5_000_000, dtype=np.uint16)
    tokens[position] = 300
    np.save(tmp_path / "tokens.npy", tokens)
    with pytest.raises(DataError, match=f"token 300 at position {position} is outside"):
        open_tokens(tmp_path / "tokens.npy", 257)


def test_token_outside_the_vocabulary_anywhere_else_is_met_when_read(tmp_path: Path) -> None:
    tokens = np.zeros(5_000_000, dtype=np.int32)
    tokens[1_500_000] = -1
    np.save(tmp_path / "tokens.npy", tokens)
    stream = open_tokens(tmp_path / "tokens.npy", 257)
    with pytest.raises(DataError, match="token -1 at position 1500000 is outside"):
        stream.sequence(15_000, 100)


@pytest.mark.parametrize(
    ("at", "new", "message"),
    [
        (0, b"TNTIDX", "does not begin with MMIDIDX"),
        (9, struct.pack("<Q", 2), "index version 2; only version 1"),
        (17, b"\x09", "dtype code 9; known codes are 1 to 8"),
        (17, b"\x07", "is not tokens: its index says float32"),
        (17, b"\x04", "has 10000 bytes, but .*corpus.idx describes 20000"),
        (18, struct.pack("<Q", 0), "describes no sequences"),
        (18, struct.pack("<Q", 99), r"is truncated: 62 bytes, its header promises 1238"),
        (34, struct.pack("<i", 4999), "has 10000 bytes, but .*corpus.idx describes 9998"),
    ],
)
def test_damaged_index(corpus: Path, at: int, new: bytes, message: str) -> None:
    damage(Path(f"{corpus}.idx"), at, new)
    with pytest.raises(DataError, match=message) as refusal:
        open_tokens(corpus, 1000)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(("size", "message"), [(0, "is empty"), (20, "is truncated: 20 bytes, its header alone")])
def test_cut_index(corpus: Path, size: int, message: str) -> None:
    os.truncate(f"{corpus}.idx", size)
    with pytest.raises(DataError, match=rf"corpus\.idx {message}"):
        open_tokens(corpus, 1000)


def test_half_a_pair(corpus: Path) -> None:
    index = Path(f"{corpus}.idx")
    hidden = index.rename(corpus.parent / "hidden")
    with pytest.raises(DataError, match=r"corpus\.idx is missing beside .*corpus\.bin"):
        open_tokens(corpus, 1000)
    with pytest.raises(DataError, match=r"corpus\.idx does not exist"):
        open_tokens(index, 1000)
    hidden.rename(index)
    Path(f"{corpus}.bin").unlink()
    with pytest.raises(DataError, match=r"corpus\.bin does not exist"):
        open_tokens(corpus, 1000)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("readme.md", b"words", "readme.md is not tokens: name a .bin/.idx pair"),
        ("words.bin", b"plain words, even in number.", "is not tokens: it holds text; tokenise it first"),
        ("odd.bin", b"\x01\x00\x02", "is not tokens: its 3 bytes are not a multiple of 2"),
        ("empty.bin", b"", "is empty"),
        ("words.npy", b"words", "is not a whole numpy array"),
    ],
)
def test_files_that_are_not_tokens(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as refusal:
        open_tokens(tmp_path / name, 2**17)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros(9), r"expected integers in one dimension, found float64 of shape \(9,\)"),
        (np.zeros((3, 3), dtype=np.uint16), r"expected integers in one dimension, found uint16 of shape \(3, 3\)"),
        (np.zeros(0, dtype=np.uint16), "holds no tokens"),
        (np.array([None, 1]), "is not a whole numpy array"),
    ],
)
def test_numpy_arrays_that_are_not_tokens(tmp_path: Path, array: np.ndarray, message: str) -> None:
    np.save(tmp_path / "tokens.npy", array, allow_pickle=True)
    with pytest.raises(DataError, match=message):
        open_tokens(tmp_path / "tokens.npy", 10)


def test_cut_numpy_array(tmp_path: Path) -> None:
    np.save(tmp_path / "tokens.npy", np.arange(10_000, dtype=np.uint16))
    os.truncate(tmp_path / "tokens.npy", 9_000)
    with pytest.raises(DataError, match="is not a whole numpy array"):
        open_tokens(tmp_path / "tokens.npy", 10_000)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nowhere/corpus", r"no tokens at nowhere/corpus: there is neither nowhere/corpus\.bin"),
        ("nowhere/corpus.bin", r"nowhere/corpus\.bin does not exist"),
        ("nowhere/tokens.npy", r"nowhere/tokens\.npy does not exist"),
        ("n" * 5000, "cannot read n+: File name too long"),
    ],
)
def test_missing_source(source: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        open_tokens(source, 10)


def test_directory_as_source(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not tokens"):
        open_tokens(tmp_path, 10)


def test_prepare_takes_directories_by_suffix_and_files_as_named(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "deep").mkdir(parents=True)
    (tree / "b.txt").write_text("bb")
    (tree / "deep" / "a.TXT").write_text("a")
    (tree / "deep" / "latin1.txt").write_bytes("né".encode("latin-1"))
    (tree / "picture.png").write_bytes(b"png")
    (tmp_path / "notes").write_text("n")

    prepared = prepare([tmp_path / "notes", tree], tmp_path / "out" / "corpus.bin", suffixes=[".txt"])

    assert prepared.prefix == tmp_path / "out" / "corpus"
    assert (prepared.documents, prepared.tokens, prepared.skipped_files) == (3, 7, 1)
    assert read_indexed(prepared.prefix)[0] == [[*b"n", 256], [*b"bb", 256], [*b"a", 256]]


def test_a_file_that_turns_out_not_to_be_text_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"x" * 3_000_000 + b"\xff")
    (tmp_path / "b.txt").write_text("é" * 1_000_000)
    (tmp_path / "cut.txt").write_bytes("é".encode()[:1])
    prepared = prepare([tmp_path], tmp_path / "corpus")
    assert (prepared.documents, prepared.tokens, prepared.skipped_files) == (1, 2_000_001, 2)
    assert bytes(read_indexed(prepared.prefix)[0][0][:-1]).decode() == "é" * 1_000_000


def test_a_failed_prepare_keeps_the_old_pair(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("first")
    prepare([tmp_path / "a.txt"], tmp_path / "corpus")
    with pytest.raises(DataError, match=r"missing\.txt does not exist"):
        prepare([tmp_path / "a.txt", tmp_path / "missing.txt"], tmp_path / "corpus")
    assert bytes(open_tokens(tmp_path / "corpus", 257).sequence(0, 5)[:-1].tolist()) == b"first"
    assert sorted(os.listdir(tmp_path)) == ["a.txt", "corpus.bin", "corpus.idx"]


def test_prepare_replaces_the_old_pair(tmp_path: Path) -> None:
    for text in ("first and longer", "second"):
        (tmp_path / "a.txt").write_text(text)
        prepare([tmp_path / "a.txt"], tmp_path / "corpus")
    assert read_indexed(tmp_path / "corpus")[0] == [[*b"second", 256]]


def test_prepare_refuses(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no text to tokenise: 0 files"):
        prepare([tmp_path], tmp_path / "corpus")
    with (tmp_path / "huge.txt").open("wb") as stream:
        stream.truncate(2**31)
    with pytest.raises(DataError, match=r"huge\.txt is too long for one document"):
        prepare([tmp_path], tmp_path / "corpus")
    with pytest.raises(DataError, match=r"cannot prepare .*huge\.txt/corpus\.bin"):
        prepare([tmp_path], tmp_path / "huge.txt" / "corpus")
    assert os.listdir(tmp_path) == ["huge.txt"]
