"""choose: which of a repository's files a name asks for."""

from __future__ import annotations

import pytest

from ngramspec.errors import ModelError
from ngramspec.models.hub_files import choose

REPOSITORY = [
    "README.md",
    "config.json",
    "Model-7B-Q4_K_M.gguf",
    "Model-7B-Q4_K_S.gguf",
    "Model-7B-Q8_0.gguf",
    "Model-7B-F16.gguf",
    "Model-7B-UD-Q2_K_XL.gguf",
    "Model-7B-IQ2_M.gguf",
    "Model-7B-UD-IQ2_M.gguf",
    "mmproj-F16.gguf",
    "mtp-Model-7B-Q4_K_M.gguf",
    "imatrix_q8_0.gguf",
    "BF16/Model-7B-BF16-00002-of-00002.gguf",
    "BF16/Model-7B-BF16-00001-of-00002.gguf",
    "Q6_K/Model-7B-Q6_K-00001-of-00002.gguf",
]

BF16 = [
    "BF16/Model-7B-BF16-00001-of-00002.gguf",
    "BF16/Model-7B-BF16-00002-of-00002.gguf",
]


@pytest.mark.parametrize(
    ("wanted", "files"),
    [
        (None, ["Model-7B-Q4_K_M.gguf"]),
        ("Q4_K_M", ["Model-7B-Q4_K_M.gguf"]),
        ("q8_0", ["Model-7B-Q8_0.gguf"]),
        ("f16", ["Model-7B-F16.gguf"]),
        ("Q2_K_XL", ["Model-7B-UD-Q2_K_XL.gguf"]),
        ("IQ2_M", ["Model-7B-IQ2_M.gguf"]),
        ("UD-IQ2_M", ["Model-7B-UD-IQ2_M.gguf"]),
        ("bf16", BF16),
        ("Model-7B", BF16),
        ("Model-7B-Q4_K_S.gguf", ["Model-7B-Q4_K_S.gguf"]),
        ("BF16/Model-7B-BF16-00002-of-00002.gguf", BF16),
        ("Model-7B-BF16-00001-of-00002.gguf", BF16),
    ],
)
def test_what_is_found(wanted: str | None, files: list[str]) -> None:
    assert choose(REPOSITORY, wanted) == files


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [
        ("Q4_K", "there is no Q4_K in this repository; it has BF16, F16, IQ2_M, Q4_K_M, Q4_K_S,"),
        ("Q5_0", "there is no Q5_0 in this repository"),
        ("Model-7B-Q4_K_L.gguf", r"did you mean Model-7B-Q4_K_.\.gguf or "),
        ("zzzzzzzz.gguf", "there is no model file zzzzzzzz.gguf in this repository; it has BF16/"),
        ("mmproj-F16.gguf", "there is no model file mmproj-F16.gguf"),
        ("Q6_K", "only 1 of the 2 parts of Q6_K/Model-7B-Q6_K-00001-of-00002.gguf are there"),
    ],
)
def test_what_is_not_found(wanted: str, reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        choose(REPOSITORY, wanted)


def test_the_only_model_needs_no_quantisation() -> None:
    assert choose(["a.txt", "tiny.gguf", "mmproj-tiny.gguf"], None) == ["tiny.gguf"]
    assert choose(BF16, None) == BF16


def test_without_a_quantisation_what_llama_cpp_takes() -> None:
    assert choose(["m.F16.gguf", "m.Q8_0.gguf"], None) == ["m.Q8_0.gguf"]
    assert choose(["m.Q2_K.gguf", "m.F16.gguf", "dflash-m-Q4_K_M.gguf"], None) == ["m.F16.gguf"]


def test_no_models() -> None:
    with pytest.raises(ModelError, match="no GGUF model"):
        choose(["model.safetensors", "mmproj-F16.gguf"], None)


def test_two_models_of_one_quantisation_or_name() -> None:
    assert choose(["b-Q8_0.gguf", "a-Q8_0.gguf"], "Q8_0") == ["a-Q8_0.gguf"]
    with pytest.raises(ModelError, match=r"the name of several files; name one of them: a/m\.gguf, b/m\.gguf"):
        choose(["a/m.gguf", "b/m.gguf"], "m.gguf")


def test_the_end_of_a_word_where_no_whole_one_is_there() -> None:
    assert choose(["m-BF16.gguf", "m-F16.gguf"], "f16") == ["m-F16.gguf"]
    assert choose(["m-BF16.gguf", "m-Q8_0.gguf"], "f16") == ["m-BF16.gguf"]


@pytest.mark.parametrize("name", ["m.Q4_K_M.gguf", "m-q4_k_m.gguf", "m_Q4_K_M.gguf"])
def test_the_separators_in_use(name: str) -> None:
    assert choose([name, "m-Q8_0.gguf"], None) == [name]
