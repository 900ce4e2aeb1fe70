"""Plan of every shipped model shape: parameter counts, sharding rules, edits, invalid sizes."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, replace

import pytest

from gangline.config.defaults import build_default_run
from gangline.config.schema import EditConfig
from gangline.errors import UserError
from gangline.model.build import construct
from gangline.model.compose import compose_model
from gangline.model.flops import count_parameters
from gangline.model.tree import get_parameter_shapes, replace_node
from gangline.plan import HFName, Init, Plan, Seam, ShardRule, matches
from gangline.plugin import registry
from gangline.plugin.parts import Part
from gangline_basics.model import config, presets
from gangline_basics.model.config import DecoderConfig
from gangline_basics.model.decoder_nodes import FeedForwardNode
from gangline_basics.model.plan import plan_decoder

# Parameter counts according to the model cards and config.json files.
PUBLISHED = {
    "gpt2-124m": 123_551_232,  # GPT-2 small has 124,439,808, with learned positions and biases
    "llama3-1b": 1_235_814_400,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
}
PARTS = (*config.PARTS, *presets.PARTS)
BY_NAME = {part.name: part for part in PARTS}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_shapes_have_published_parameter_counts(name):
    tree, _ = plan_decoder(BY_NAME[name].config())
    assert count_parameters(tree) == PUBLISHED[name]


def test_tiny_has_below_three_million_parameters():
    assert count_parameters(plan_decoder(BY_NAME["tiny"].config())[0]) < 3_000_000


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
class TestEveryPart:
    def test_plan_rules_match_all_parameters(self, part):
        tree, plan = plan_decoder(part.config())
        names = get_parameter_shapes(tree)
        assert plan.find_unmatched(names) == []
        for name in names:
            assert plan.init(name)
            assert [rule for rule in plan.names if rule.translate(name)], name
        for rule in plan.names:
            assert any(rule.translate(name) for name in [*names, *dict(plan.tied)]), rule
        theirs = [rule.translate(name) for name in names for rule in plan.names if rule.translate(name)]
        assert len(set(theirs)) == len(names)

    def test_every_matrix_can_be_sharded_along_tp(self, part):
        tree, plan = plan_decoder(part.config())
        for name, shape in get_parameter_shapes(tree).items():
            rules = plan.get_shard_rules(name, len(shape))
            if len(shape) == 1:
                assert not rules, name
            else:
                assert list(rules) == ["tp"], name
                assert shape[rules["tp"].dim] % rules["tp"].granularity == 0

    def test_meta_model_matches_node_tree(self, part):
        config = replace(part.config(), layers=2)
        tree, plan = plan_decoder(config)
        model = construct(tree)
        assert {name: tuple(p.shape) for name, p in model.named_parameters()} == get_parameter_shapes(tree)
        modules = dict(model.named_modules())
        assert {plan.embed, plan.blocks, plan.head} <= set(modules)
        assert len(modules[plan.blocks]) == plan.layers == plan.facts["layers"] == 2
        for seam in plan.seams:
            found = [module for path, module in modules.items() if path and matches(seam.pattern, path)]
            assert any(callable(getattr(module, seam.name, None)) for module in found)

    def test_default_configuration_is_valid(self, part):
        assert part.config().check(None) == []

    def test_part_is_registered(self, part):
        offer = registry.installed().find_part(part.config())
        assert (offer.group, offer.part.name) == ("model", part.name)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            {"dim": 100, "heads": 12},
            ["model.dim=100", "model.heads=12", "model.heads=10; or model.heads=5"],
        ),
        ({"heads": 12, "kv_heads": 5}, ["model.kv_heads=5", "1, 2, 3, 4, 6, 12"]),
        ({"head_dim": 15}, ["model.head_dim=15 must be even", "model.head_dim=16"]),
        ({"dim": 36, "heads": 12}, ["model.head_dim=3 must be even"]),
    ],
)
def test_invalid_sizes_are_refused(values, words):
    config = DecoderConfig(**values)
    run = build_default_run(model=config)
    found = config.check(run)
    text = "\n".join(line for problem in found for line in (problem.what, *problem.format_details()))
    for word in words:
        assert word in text


def test_plan_needs_no_torch():
    code = (
        "import sys\n"
        "from gangline_basics.model.presets import PARTS\n"
        "from gangline_basics.model.plan import plan_decoder\n"
        "from gangline.model.compose import compose_model\n"
        "from gangline.model.flops import count_flops_per_token, count_parameters\n"
        "tree, plan = plan_decoder(PARTS[0].config())\n"
        "count_flops_per_token(tree, 128, plan), count_parameters(tree)\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


class TestRules:
    def test_star_matches_one_component(self):
        assert matches("blocks.*.wq", "blocks.3.wq")
        assert matches("blocks.*.wq", "blocks.3.wq.weight")
        assert not matches("blocks.*.wq", "blocks.3.x.wq")
        assert not matches("blocks.*.wq", "blocks.3.wqs")

    def test_first_rule_wins_and_edits_precede(self):
        plan = Plan("e", "b", "h", 1, inits=(Init("b.*.w", "normal", 1.0), Init("b", "constant")))
        assert plan.init("b.0.w.weight").distribution == "normal"
        assert plan.init("b.0.x.weight").distribution == "constant"
        assert plan.extend(inits=(Init("b.0.w", "uniform"),)).init("b.0.w.weight").distribution == "uniform"
        with pytest.raises(LookupError, match=r"c\.weight"):
            plan.init("c.weight")

    def test_first_shard_rule_decides_for_each_axis(self):
        rules = (
            ShardRule.rowwise("b.*.down"),
            ShardRule("b.*.down.bias", 0),
            ShardRule.colwise("b.*.down", 4),
            ShardRule("b.*.down", 0, "lane"),
        )
        plan = Plan("e", "b", "h", 1, sharding=rules)
        assert plan.get_shard_rules("b.0.down.weight", 2) == {
            "tp": ShardRule("b.*.down", 1),
            "lane": ShardRule("b.*.down", 0, "lane"),
        }
        assert plan.get_shard_rules("b.0.down.bias", 1) == {"lane": ShardRule("b.*.down", 0, "lane")}
        assert plan.get_shard_rules("b.0.norm.weight", 1) == {}

    def test_shard_rule_whole_disables_sharding_along_axes(self):
        rest = (ShardRule.colwise("b.*.up"), ShardRule("b.*.up", 0, "lane"))
        plan = Plan(
            "e",
            "b",
            "h",
            1,
            sharding=(ShardRule.replicated("b.*.up.small"), ShardRule.replicated("b.*.up.side", "tp"), *rest),
        )
        assert plan.get_shard_rules("b.0.up.small.weight", 2) == {}
        assert list(plan.get_shard_rules("b.0.up.side.weight", 2)) == ["lane"]
        assert list(plan.get_shard_rules("b.0.up.weight", 2)) == ["tp", "lane"]
        assert plan.extend(sharding=(ShardRule.rowwise("b.*.up.small"),)).get_shard_rules("b.0.up.small", 2).keys() == {
            "tp"
        }

    def test_tied_parameter_is_sharded_like_its_owner(self):
        plan = Plan(
            "e", "b", "h", 1, sharding=(ShardRule("e.w", 0), ShardRule.replicated("h.w")), tied=(("h.w", "e.w"),)
        )
        assert plan.get_shard_rules("h.w", 2) == plan.get_shard_rules("e.w", 2) == {"tp": ShardRule("e.w", 0)}

    @pytest.mark.parametrize("wrong", [{"dim": -1}, {"dim": 0, "granularity": 0}, {"dim": 0, "axis": "*"}])
    def test_invalid_shard_rule_is_refused(self, wrong):
        with pytest.raises(ValueError, match=r"shard rule of b\.\*"):
            ShardRule("b.*", **wrong)

    def test_translated_names_contain_star_matches(self):
        assert HFName("b.*.e.*.w", "layers.{0}.experts.{1}.w").translate("b.3.e.7.w") == "layers.3.experts.7.w"
        assert HFName("b.*.w", "layers.{0}.{n}.w", "stack").translate("b.3.w") == "layers.3.{n}.w"
        assert HFName("b.*.w", "layers.{0}.w").translate("b.3.w.bias") is None

    def test_unmatched_patterns_are_found(self):
        plan = Plan(
            "e", "b", "h", 1, sharding=(ShardRule("b.*.q", 0),), inits=(Init("b", "normal"), Init("x", "normal"))
        )
        assert plan.find_unmatched(["b.0.k.weight"]) == ["b.*.q", "x"]

    def test_tied_head_belongs_to_embedding(self):
        plan = plan_decoder(DecoderConfig(tied=True))[1]
        assert plan.get_owner("head.weight") == "embed.weight"
        assert plan.get_owner("embed.weight") == "embed.weight"
        assert Seam("loss", "head") in plan.seams


@dataclass
class Widen(EditConfig):
    """Edit that sets the feed-forward width of the chosen blocks."""

    at: tuple[str, ...] = ()
    hidden: int = 8


@dataclass
class Other(Widen):
    """Edit of another option group."""


def widen(tree, plan, options):
    for path in options.at:
        if path.endswith("feed_forward"):
            tree = replace_node(tree, path, FeedForwardNode(dim=plan.facts["dim"], ffn_dim=options.hidden))
    return tree, plan.extend(master_dtype=(type(options).__name__,)), list(options.at)


class TestEdits:
    @pytest.fixture
    def run(self, monkeypatch):
        """Run with two edits registered as if plugins offered them."""
        from gangline.config.defaults import build_default_run

        parts = {cls: Part(name="on", config=cls, build=f"{__name__}:widen", summary="wider") for cls in (Widen, Other)}
        known = registry.installed()

        class Installed:
            def find_part(self, config):
                part = parts.get(type(config))
                return known.find_part(config) if part is None else type("Offer", (), {"part": part})

        monkeypatch.setattr("gangline.model.compose.installed", Installed)
        return build_default_run()

    def test_edits_change_tree_in_group_order(self, run):
        run.edits = {
            "wide": Widen(at=("blocks.0.feed_forward",)),
            "other": Other(at=("blocks.1.feed_forward",), hidden=9),
        }
        tree, plan = compose_model(run)
        assert [block.feed_forward.ffn_dim for block in tree.blocks][:3] == [8, 9, run.model.ffn_dim]
        assert plan.master_dtype == ("Widen", "Other")  # `other` was first: edits run in order of group names

    def test_one_edit_may_change_nested_nodes(self, run):
        run.edits = {"wide": Widen(at=("blocks.0.feed_forward", "blocks.0"))}
        compose_model(run)

    @pytest.mark.parametrize("inside", ["blocks.0.feed_forward", "blocks.0"])
    def test_two_edits_of_one_node_are_refused(self, run, inside):
        run.edits = {"wide": Widen(at=("blocks.0.feed_forward",)), "other": Other(at=(inside,))}
        with pytest.raises(UserError) as caught:
            compose_model(run)
        assert "other" in caught.value.what
        assert "wide" in caught.value.what
        assert inside in caught.value.what
        assert "wide=off" in str(caught.value)

    @pytest.mark.parametrize("paths", [("blocks.1", "blocks.10"), ("blocks.10", "blocks.1")])
    def test_paths_with_common_prefix_do_not_clash(self, run, paths):
        run.edits = {"wide": Widen(at=paths[:1]), "other": Other(at=paths[1:])}
        compose_model(run)
