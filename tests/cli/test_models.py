"""`telamon models`."""

import json
import sys

import pytest

from telamon.config import presets


@pytest.mark.parametrize("name", presets.names("models"))
def test_the_head_of_a_preset_says_its_number_of_parameters(name):
    """The figure in the comment is the one that the model is held to."""
    line = next(line for line in presets.model_lines() if line.name == name)
    about = presets.about_model(name)
    if "nobody" in about or "/" in about.splitlines()[0]:
        assert f"{line.parameters:,} parameters" in about.splitlines()[0]
        assert line.active == line.parameters or f"of which a token uses {line.active:,}" in about.splitlines()[0]
    assert about, "a preset says where its sizes are from"


def test_list_shows_every_preset_by_family_and_size(telamon):
    out = telamon("models", "list").out
    names = [words[1] for row in out.splitlines() if len(words := row.split()) > 2 and words[1] in presets.names("models")]
    assert sorted(names) == presets.names("models")
    qwen = [name for name in names if name.startswith("qwen2.5")]
    assert qwen == [f"qwen2.5-{size}b" for size in ("0.5", "1.5", "3", "7", "14", "32", "72")]
    assert names.index("gemma3-27b") < names.index("llama2-7b") < names.index("mistral-7b-v0.1")


def test_list_says_of_mixtures_how_much_of_them_works_on_a_token(telamon):
    out = telamon("models", "list").out
    rows = {cells[0]: cells[-2:] for row in out.splitlines() if len(cells := [cell.strip() for cell in row.split("│")[1:-1]]) == 6}
    assert rows["mixtral-8x7b"] == ["46.70B", "12.88B"] and rows["qwen3-235b-a22b"] == ["235.1B", "22.19B"]
    assert rows["qwen3-8b"] == ["8.191B", ""] and rows["gemma3-270m"] == ["268.1M", ""]


def test_list_reads_files_alone(telamon, monkeypatch):
    """It stays quick however many presets there are: no model is built, and JAX is not even imported."""
    monkeypatch.setitem(sys.modules, "jax", None)  # importing it would fail
    assert telamon("models", "list").code == 0


def test_a_part_of_a_name_or_family_chooses(telamon):
    out = telamon("models", "list", "gemma3").out
    assert "gemma3-270m" in out and "gemma3-27b" in out and "gemma2" not in out and "llama" not in out
    answer = telamon("models", "list", "gema3")
    assert answer.code == 2 and "did you mean 'gemma3'?" in answer.err


@pytest.mark.parametrize("words", [("show", "qwen3-8"), ("diff", "qwen3-8b", "qwen3-8"), ("diff", "qwen3-8", "qwen3-8b")])
def test_an_unknown_preset_is_refused_with_the_nearest(telamon, words):
    answer = telamon("models", *words)
    assert answer.code == 2 and "did you mean 'qwen3-8b'?" in answer.err


def test_a_name_like_no_preset_is_answered_with_where_they_are_listed(telamon):
    answer = telamon("models", "show", "")
    assert answer.code == 2 and answer.err == "no model preset is named ''; see `telamon models list`\n"


def test_show_says_what_a_model_is_and_costs(telamon):
    """By hand, for 2 layers, V 512, D 32, F 64, 4 query and 2 key-value heads of 8, tied.

    A layer: norms 64, queries and output 2 x 1,024, keys and values 2 x 512, MLP 3 x 2,048: 9,280. In all 2 x 9,280 + 16,384
    of the table + 32 of the last norm = 34,976. In rows of 4,096 tokens: 6 x 34,976 + 6 x 2 layers x 4,096 x 32 FLOPs a token.
    A token's keys and values: 2 layers x 2 x 2 heads x 8 x 2 bytes.
    """
    lines = telamon("models", "show", "tiny-llama").out.splitlines()
    text = " ".join(" ".join(lines).split())
    for expected in (
        "parameters 34,976",
        "16,384 of the table of tokens, which is the output head too",
        "9,280 a layer",
        "layers 2: 2 over all before",
        "1.783 M forward and backward, 594.2 k forward alone, in rows of 4,096 tokens",
        "546.5 KiB over all devices",
        "16 bytes a parameter",
        "activations come on top",
        "68.31 KiB of weights in bfloat16",
        "128 bytes of keys and values a token",
        "1 MiB of them for 8,192 tokens",
        "d_ff: 64",
    ):
        assert expected in text, expected


def test_show_says_how_much_of_a_mixture_works_on_a_token(telamon):
    """Its FLOPs are those of what a token meets: all but the table that is looked up, and 6 of 8 experts a layer."""
    text = telamon("models", "show", "mixtral-8x7b").out
    assert "46,702,792,704" in text and "12,879,925,248 of them active" in text
    card = json.loads(telamon("models", "show", "mixtral-8x7b", "--json").out)
    matmul = 12_879_925_248 - 32_000 * 4096
    assert (card["parameters"]["active"], card["parameters"]["matmul"]) == (12_879_925_248, matmul)
    assert card["flops_per_token"]["4096"] == 6 * matmul + 6 * 32 * 4096 * 4096
    assert card["memory"]["training_bytes"] == 16 * 46_702_792_704
    assert "active" not in telamon("models", "show", "qwen3-8b").out


def test_show_says_which_layers_slide_and_what_windows_save(telamon):
    """26 layers of 1 key-value head of 256: 26 x 1,024 bytes a token, of which the 4 global ones stay beyond 512 tokens; at 8,192
    tokens 22 x 512 + 4 x 8,192 rows of 1,024 bytes."""
    card = json.loads(telamon("models", "show", "gemma3-1b", "--json").out)
    assert card["layers"] == "26: 4 times (5 within the last 512 tokens, 1 over all before), 2 within the last 512 tokens"
    assert card["memory"]["cache_per_token_bytes"] == 26 * 1024
    assert card["memory"]["cache_per_token_beyond_bytes"] == 4 * 1024
    assert card["memory"]["cache_served_bytes"] == (22 * 512 + 4 * 8192) * 1024
    assert card["repository"] == "google/gemma-3-1b-pt" and card["architecture"] == "Gemma3ForCausalLM"


def test_a_window_lowers_the_flops_of_a_preset(telamon):
    """Mistral 7B in rows of 32,768: 12 x 32 layers x 4,096 FLOPs a pair; causal T²/2 pairs, with a window of 4,096 T W - W²/2."""
    length, window, matmul = 32_768, 4096, 7_241_732_096 - 32_000 * 4096
    pairs = {"mistral-7b-v0.1": length * window - window**2 / 2, "mistral-7b-v0.2": length**2 / 2}
    for name, expected in pairs.items():
        card = json.loads(telamon("models", "show", name, "--json").out)
        flops = card["flops_per_token"][str(length)]
        assert card["forward_flops_per_token"][str(length)] == pytest.approx(flops / 3, abs=1)
        assert flops == pytest.approx(6 * matmul + 12 * 32 * 4096 * expected / length, rel=1e-12)


def test_show_reads_the_records_of_checks_and_says_what_was_not_checked(telamon, tmp_path):
    shown = telamon("models", "show", "tiny-llama", "--records", tmp_path / "none").out
    assert "parameter count: not checked" in shown and "records of checks are in a checkout" in shown
    folder = tmp_path / "records"
    assert telamon("verify", "tiny-llama", "--checks", "parameter-count", "--folder", folder).code == 0
    shown = telamon("models", "show", "tiny-llama", "--records", folder).out
    assert "parameter count: passed (0, at most 0.005" in shown
    assert "resume: not checked" in shown and "checkout" not in shown
    checks = json.loads(telamon("models", "show", "tiny-llama", "--json", "--records", folder).out)["checks"]
    assert checks["parameter-count"]["whole"]["passed"] is True and checks["resume"] == {"whole": None, "tiny": None}


def test_diff_shows_sizes_and_figures_that_differ_and_nothing_else(telamon):
    rows = json.loads(telamon("models", "diff", "mistral-7b-v0.1", "mistral-7b-v0.3", "--json").out)
    assert rows["model.window"] == {"mistral-7b-v0.1": 4096, "mistral-7b-v0.3": None}
    assert rows["model.rope_theta"] == {"mistral-7b-v0.1": 10000.0, "mistral-7b-v0.3": 1000000.0}
    assert rows["parameters.total"] == {"mistral-7b-v0.1": 7241732096, "mistral-7b-v0.3": 7248023552}
    assert "model.d_model" not in rows and "model.preset" not in rows and "parameters.per_layer" not in rows


def test_diff_is_a_table_with_figures_for_people(telamon, monkeypatch):
    """As above; weights in bfloat16 are 2 x 7,241,732,096 bytes, which are 13.49 GiB. A group's name stands on a line of its own."""
    monkeypatch.setenv("COLUMNS", "120")
    answer = telamon("models", "diff", "mistral-7b-v0.1", "mistral-7b-v0.3")
    rows = {cells[0]: cells[1:] for line in answer.out.splitlines() if len(cells := [cell.strip() for cell in line.split("│")[1:-1]]) == 3}
    assert answer.code == 0
    assert rows["repository"] == ["mistralai/Mistral-7B-v0.1", "mistralai/Mistral-7B-v0.3"]
    assert rows["window"] == ["4,096", "none"] and rows["rope_theta"] == ["10,000", "1,000,000"]
    assert rows["all"] == ["7,241,732,096", "7,248,023,552"]
    assert rows["weights to serve"] == ["13.49 GiB", "13.5 GiB"]
    assert rows["rows of 4,096"] == ["45.89 G", "45.9 G"]
    assert not {"d_model", "published_parameters", "model.window"} & set(rows)
    assert [group for group in rows if rows[group] == ["", ""]] == ["model", "settings", "parameters", "FLOPs a token, training", "memory"]


def test_diff_compares_work_at_the_lengths_of_both(telamon):
    """Llama 3 is made for 8,192 tokens and 3.1 for 131,072; the same block costs the same at each."""
    rows = json.loads(telamon("models", "diff", "llama3-8b", "llama3.1-8b", "--json").out)
    assert rows["model.rope_scaling.factor"] == {"llama3.1-8b": 8.0}
    assert not [key for key in rows if key.startswith(("flops", "parameters", "memory"))]


def test_diff_of_a_model_and_itself(telamon):
    answer = telamon("models", "diff", "tiny-llama", "tiny-llama")
    assert answer.code == 0 and answer.out == "no difference\n"


def test_diff_of_two_families_shows_what_one_alone_has(telamon):
    rows = json.loads(telamon("models", "diff", "gpt3-52k", "tiny-llama", "--json").out)
    assert rows["model.rope_theta"] == {"tiny-llama": 10000.0}
    assert rows["parameters.positions"] == {"gpt3-52k": 32768, "tiny-llama": 0}
