"""Generation with the KV cache of each family, compared with uncached generation and with transformers."""

from __future__ import annotations

import pytest
import torch
from family_cases import CASES, LENGTH, theirs
from test_families import ours, run_of

from gangline.model.compose import compose_model
from gangline.model.linear import Linear
from gangline.runtime import Sampling
from gangline_basics.model.seams import list_recomputed
from gangline_basics.sampling.sampler import generate
from gangline_models.modules.latent import LatentUp

START = 9
# Their rotary positions turn faster or slower as the text grows; ours are of the run's rows (`gangline_models.rope`).
GROWING = {"qwen2-dynamic", "phi3-longrope"}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """name -> (their model, our run and model, in float64)."""

    def make(name: str):
        directory = tmp_path_factory.mktemp(name)
        model = theirs(name)
        model.save_pretrained(directory)
        run = run_of(directory)
        return model.double(), run, ours(run, torch.float64)

    return make


def prompts(vocab_size: int, *lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(2, vocab_size, (length,), generator=generator).tolist() for length in lengths]


@pytest.mark.parametrize("name", CASES)
def test_greedy_tokens_match_transformers(name, pair):
    model, run, mine = pair(name)
    assert list_recomputed(compose_model(run)[0]) == []
    starts = prompts(model.config.vocab_size, START, START)
    how = Sampling(tokens=LENGTH - START)
    cached = [one.tokens for one in generate(mine, starts, how, cached=True)]
    assert cached == [one.tokens for one in generate(mine, starts, how, cached=False)]
    if name in GROWING:
        return
    with torch.no_grad():
        whole = model.generate(
            torch.tensor(starts), max_new_tokens=how.tokens, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    assert cached == whole[:, START:].tolist()


UNEQUAL = ["qwen2", "qwen2-windows", "olmo3", "gemma2", "gemma3", "gpt2", "phi3"]
UNEQUAL += ["deepseek-v3-dense", "deepseek-v3-yarn", "qwen3-next-dense", "qwen3-next-yarn"]


@pytest.mark.parametrize("name", UNEQUAL)
def test_batched_generation_matches_single_prompts(name, pair):
    model, _, mine = pair(name)
    starts = prompts(model.config.vocab_size, 1, 17, 4, 9)
    for how in (Sampling(tokens=24), Sampling(tokens=24, temperature=1.3, top_p=0.9, seed=4)):
        together = generate(mine, starts, how, cached=True)
        assert together == generate(mine, starts, how, cached=False)
        assert together[0] == generate(mine, starts[:1], how, cached=True)[0]
    assert len({tuple(one.tokens) for one in together}) == len(starts)


class Adapted(Linear):
    """A matmul that is more than its weight, as with an adapter around it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + x.roll(1, -1) @ self.weight.T


def test_cached_generation_with_latent_adapter_matches_uncached(pair):
    _, run, mine = pair("deepseek-v3-dense")
    how, starts = Sampling(tokens=20), prompts(run.model.vocab_size, 5, 8)
    plain = generate(mine, starts, how, cached=True)
    for module in mine.modules():
        if isinstance(module, LatentUp):
            module.up.__class__ = Adapted
    adapted = generate(mine, starts, how, cached=True)
    assert adapted == generate(mine, starts, how, cached=False)
    assert adapted != plain
