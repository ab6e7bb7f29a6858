"""The schedules that simplify a graph: what they change, what they leave alone and why, and that values stay."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bitwright as bw
from bitwright.errors import ConfigError
from bitwright.graph import capture_model, run_stage
from tests.graph.passes.nets import Net, notes_of, shuffle_channels


def prepared(net, *examples, schedules=None, **others):
    """Prepare in debug mode; the result equals the original on the example and on other inputs, bit for bit."""
    torch.manual_seed(1)
    net = net.eval()
    model = bw.prepare(net, examples[0], recipe={"schedules": schedules or {}}, debug=True, **others)
    for example in examples:
        args = example if isinstance(example, tuple) else (example,)
        with torch.no_grad():
            torch.testing.assert_close(model(*args), net(*args), rtol=0, atol=0)
    return model


def targets(model):
    return [n.target for n in model.graph.nodes if n.op not in ("placeholder", "output")]


def image(batch=2, channels=3, size=6):
    return torch.randn(batch, channels, size, size)


# -------------------------------------------------------------------------------------------------- identity, dropout


def test_identities_go_and_keep_their_names():
    net = Net(
        lambda self, x: self.b(self.none(self.empty(self.a(x)))) + self.none(x).mean(),
        **{"a": nn.Conv2d(3, 4, 1), "none": nn.Identity(), "empty": nn.Sequential(), "b": nn.Conv2d(4, 4, 1)},
    )
    model = prepared(net, image(), image(5))
    assert notes_of(model, "remove_identity").count("removed none") == 2
    assert "none" not in targets(model)
    assert isinstance(model.none, nn.Identity)


def test_an_identity_with_a_hook_stays():
    net = Net(lambda self, x: self.b(self.none(x)), none=nn.Identity(), b=nn.Conv2d(3, 4, 1))
    seen = []
    net.none.register_forward_hook(lambda m, a, out: seen.append(out.shape))
    model = prepared(net, image())
    assert notes_of(model, "remove_identity") == ["not removed: none, it has hooks"]
    seen.clear()
    model(image(3))
    assert seen == [(3, 3, 6, 6)]


def test_concatenations_with_nothing_but_one_operand_go():
    def body(self, x):
        y = self.a(x)
        kept = torch.cat([torch.tensor([], dtype=torch.float64), y.flatten()])  # promotes the type
        held = torch.cat([y[:, :0], y], 1)  # a slice may hold something for other inputs
        return torch.cat([torch.tensor([], dtype=y.dtype), y], dim=1), kept, held

    model = prepared(Net(body, a=nn.Linear(6, 4)), torch.randn(3, 6), torch.randn(5, 6))
    assert notes_of(model, "remove_identity") == ["removed cat_2"]


def test_dropout_stays_for_training_unless_told():
    def body(self, x):
        x = F.dropout(self.none(self.drop(self.a(x))), 0.3, self.training)
        return self.b(x)

    net = Net(body, a=nn.Linear(6, 8), drop=nn.Dropout(0.5), none=nn.Dropout(0.0), b=nn.Linear(8, 3))
    model = prepared(net, torch.randn(4, 6), torch.randn(7, 6))
    notes = notes_of(model, "remove_dropout")
    assert notes == ["removed none", "removed dropout", "not removed: drop, training needs it"]
    x = torch.ones(64, 6)
    model.train()
    assert not torch.equal(model(x), model(x))  # it still drops
    model = prepared(net, torch.randn(4, 6), schedules={"remove_dropout": {"trained": True}})
    assert "drop" not in targets(model)
    assert torch.equal(model.train()(x), model(x))


def test_dropout_is_no_obstacle_for_a_scale():
    net = Net(lambda self, x: self.b(self.drop(self.a(x))), a=nn.Linear(6, 8), drop=nn.Dropout(0.5), b=nn.Linear(8, 3))
    model = prepared(net, torch.randn(4, 6))
    assert len(model.bitwright.quantizers._modules) == 2


# ---------------------------------------------------------------------------------------------------------- dead code


def test_dead_code_goes_and_effects_stay():
    def body(self, x):
        y = self.a(x)
        torch.sigmoid(y).sum(1)
        self.norm(y)  # in training it moves its statistics
        torch.rand(3)  # what is drawn afterwards depends on it
        self.count.add_(1)
        return y + torch.rand(1).to(y) * 0

    net = Net(body, a=nn.Linear(6, 8), norm=nn.BatchNorm1d(8))
    net.register_buffer("count", torch.zeros(()))
    model = capture_model(net, torch.randn(4, 6)).model
    found = {r.name: r.notes for r in run_stage(model, "simplify")}
    assert found["remove_dead_code"] == ["removed sigmoid, which nothing reads", "removed sum_1, which nothing reads"]
    model.recompile()
    names = targets(model)
    assert "norm" in names
    assert names.count(torch.rand) == 2
    model(torch.randn(4, 6))
    assert int(model.count) == 1


def test_the_attributes_that_torch_looks_at_go():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = bw.prepare(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), torch.randn(2, 5, 8))
    assert not [n for n in model.graph.nodes if not n.users and n.op == "get_attr"]


def test_checks_of_inputs_are_no_dead_code():
    class Flagged(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(6, 8)

        def forward(self, x, twice=False):
            return self.a(x) * 2 if twice else self.a(x)

    model = bw.prepare(Flagged(), (torch.randn(2, 6), True))
    with pytest.raises(ConfigError, match="twice"):
        model(torch.randn(2, 6), False)


# ------------------------------------------------------------------------------------------------------------- sizes


def test_sizes_that_layers_fix_become_numbers():
    net = Net(lambda self, x: self.b(shuffle_channels(self.a(x), 2)), a=nn.Conv2d(3, 8, 1), b=nn.Conv2d(8, 4, 1))
    model = prepared(net, image(), image(5), image(1, size=9))
    assert any(n.endswith("is 4") for n in notes_of(model, "fold_shape_arithmetic"))
    (view,) = [n for n in model.graph.nodes if n.target == "view"]
    assert view.args[2:4] == (2, 4)
    assert all(isinstance(a, torch.fx.Node) for a in (view.args[1], *view.args[4:]))


def test_sizes_of_the_input_stay_symbolic():
    net = Net(lambda self, x: self.a(x.reshape(x.shape[0], x.shape[1] * x.shape[2])), a=nn.Linear(12, 3))
    model = prepared(net, torch.randn(2, 3, 4), torch.randn(5, 4, 3), torch.randn(1, 12, 1))
    assert notes_of(model, "fold_shape_arithmetic") == []


def test_whole_shapes_stay_shapes():
    def body(self, x):
        y = self.a(x)
        more = self.table.shape.numel() + y.shape[-1:].numel() + self.table.size().numel()
        return y.view(y.shape[0], *self.table.shape).sum(2) * more + y.reshape(y.shape[:1] + self.table.shape).mean()

    net = Net(body, a=nn.Linear(4, 6))
    net.table = nn.Parameter(torch.ones(2, 3))
    model = prepared(net, torch.randn(5, 4), torch.randn(2, 4))
    assert targets(model).count("numel") == 3  # which a tuple would not have


def test_a_size_that_the_model_returns_is_noted():
    net = Net(lambda self, x: (self.a(x), self.a(x).shape[1]), a=nn.Conv2d(3, 8, 1))
    model = prepared(net, image())
    assert any("it is a result of the model" in n for n in notes_of(model, "fold_shape_arithmetic"))
    assert model(image(4))[1] == 8


# --------------------------------------------------------------------------------------------------------- constants


def with_table(persistent):
    def body(self, x):
        return self.a(x) + torch.softmax(self.table * 2.0, 0).reshape(1, -1)

    net = Net(body, a=nn.Linear(6, 8))
    net.register_buffer("table", torch.randn(8), persistent=persistent)
    return net


def test_constants_are_computed_once():
    net = with_table(persistent=False)
    model = prepared(net, torch.randn(2, 6), torch.randn(5, 6))
    assert notes_of(model, "fold_constants") == ["computed reshape once"]
    assert torch.softmax not in targets(model)
    assert set(model.state_dict()) >= {"a.weight", "a.bias"}
    assert not [k for k in model.state_dict() if "constant" in k or "table" in k]


def test_named_buffers_may_be_loaded_later():
    net = with_table(persistent=True)
    model = prepared(net, torch.randn(2, 6))
    assert notes_of(model, "fold_constants") == ["not folded: reshape, buffer table may be loaded again"]
    state = net.state_dict() | {"table": torch.randn(8)}
    model.load_state_dict(state, strict=False)
    net.load_state_dict(state)
    x = torch.randn(3, 6)
    assert torch.equal(model(x), net(x))
    model = prepared(net, torch.randn(2, 6), schedules={"fold_constants": {"persistent": True}})
    assert notes_of(model, "fold_constants") == ["computed reshape once"]


def test_what_trains_or_is_written_is_no_constant():
    def body(self, x):
        self.steps.add_(1.0)
        return self.a(x) * torch.exp(self.gain) + torch.exp(self.steps)

    net = Net(body, a=nn.Linear(6, 8))
    net.gain = nn.Parameter(torch.zeros(8))
    net.register_buffer("steps", torch.zeros(()), persistent=False)
    model = bw.prepare(net.eval(), torch.randn(2, 6))
    assert notes_of(model, "fold_constants") == []
    x = torch.randn(2, 6)
    first, second = model(x), model(x)
    assert not torch.equal(first, second)


# ------------------------------------------------------------------------------------------------------------- parts


@pytest.mark.parametrize(
    "cut",
    [
        lambda y: y.reshape(y.shape[0], y.shape[1], 3, 4).unbind(2),
        lambda y: y.chunk(3, -1),
        lambda y: torch.chunk(y, 3, dim=2),
        lambda y: y.split(4, dim=-1),
        lambda y: torch.split(y, [4, 4, 4], -1),
    ],
)
def test_parts_are_read_one_by_one(cut):
    def body(self, x):
        q, k, v = cut(self.a(x))
        return torch.softmax(q @ k.transpose(-2, -1), -1) @ v

    model = prepared(Net(body, a=nn.Linear(6, 12)), torch.randn(2, 5, 6), torch.randn(3, 7, 6))
    (note,) = notes_of(model, "unbind_to_select")
    assert note.endswith("is read in 3 parts")
    assert [t for t in targets(model) if t in (torch.select, torch.narrow)]
    # One tensor comes into being and is quantized once, for all three parts.
    assert "a" in model.bitwright.quantizers._modules
    assert len(model.bitwright.quantizers._modules) == 3  # the input, the projection and the softmax


@pytest.mark.parametrize(
    ("body", "note"),
    [
        (lambda self, x: self.a(torch.cat(x.split([3, 3], 1)[::-1], 1)), "it is read as a whole"),
        (lambda self, x: self.a(x.chunk(2, 0)[0]), "the size it divides may change with the input"),
        (lambda self, x: torch.cat(self.a(x).split(2, -1)), "it is read as a whole"),
        (lambda self, x: self.a(x.split(x.shape[0] // 2)[0]), "its sizes are computed"),
    ],
)
def test_parts_that_stay(body, note):
    model = prepared(Net(body, a=nn.Linear(6, 4)), torch.randn(4, 6), torch.randn(2, 6))
    assert any(note in n for n in notes_of(model, "unbind_to_select"))


def test_parts_of_an_uneven_split():
    net = Net(lambda self, x: self.a(x).split(5, 1)[-1][:, :2] * self.a(x).chunk(3, 1)[2], a=nn.Conv2d(3, 8, 1))
    model = prepared(net, image(), image(3))
    assert [n.args[1:] for n in model.graph.nodes if n.target is torch.narrow] == [(1, 5, 3), (1, 6, 2)]


# ---------------------------------------------------------------------------------------------------------- reshapes


def test_views_that_follow_each_other_are_one():
    def body(self, x):
        y = self.a(x).flatten(2).unsqueeze(1).reshape(x.shape[0], 8, -1)
        return self.b(y.transpose(1, 2).permute(0, 2, 1).permute(0, 2, 1).contiguous())

    model = prepared(Net(body, a=nn.Conv2d(3, 8, 1), b=nn.Linear(8, 4)), image(), image(3, size=4))
    names = [str(t) for t in targets(model)]
    assert names.count("reshape") == 1
    assert "flatten" not in names
    assert len(notes_of(model, "merge_reshapes")) == 3


def test_permutations_that_undo_each_other_go():
    net = Net(lambda self, x: self.b(self.a(x).permute(0, 2, 3, 1).permute(0, 3, 1, 2)), a=nn.Conv2d(3, 4, 1))
    net.b = nn.Conv2d(4, 4, 1)
    model = prepared(net, image(), image(3))
    assert notes_of(model, "merge_reshapes") == ["removed permute and permute_1, which undo each other"]
    assert "permute" not in targets(model)


def test_a_view_that_others_read_stays():
    def body(self, x):
        y = self.a(x).flatten(1)
        return y.reshape(x.shape[0], 2, -1).sum(1) + y.mean()

    model = prepared(Net(body, a=nn.Conv2d(3, 4, 1)), image(), image(3))
    assert notes_of(model, "merge_reshapes") == ["not merged: reshape with flatten, which has 2 users"]


# ------------------------------------------------------------------------------------------------------------- masks


@pytest.mark.parametrize("low", [float("-inf"), torch.finfo(torch.float32).min])
def test_sums_with_masks_stay_float(low):
    def body(self, x, mask, more):
        q, k, v = self.a(x).chunk(3, -1)
        hidden = torch.zeros_like(mask, dtype=x.dtype).masked_fill(mask, low)
        return torch.softmax((q @ k.transpose(-2, -1)) / 2.0 + (hidden + more), -1) @ v

    net = Net(body, a=nn.Linear(6, 12))
    mask = torch.ones(5, 5, dtype=torch.bool).triu(1)
    inputs = (torch.randn(2, 5, 6), mask, torch.zeros(5, 5))
    model = prepared(net, inputs, (torch.randn(3, 5, 6), mask, torch.zeros(5, 5)))
    assert len(notes_of(model, "keep_masks_float")) == 2
    verdicts = {e.operator: e.verdict.value for e in bw.ledger_of(model).entries}
    assert verdicts["add_mask"] == "float"
    bw.calibrate(model, [inputs])
    with torch.no_grad():
        expected, got = net(*inputs), model(*inputs)
    assert float((got - expected).pow(2).mean()) < 0.01 * float(expected.pow(2).mean())


def test_schedules_can_be_switched_off():
    net = Net(lambda self, x: self.b(self.none(x)), none=nn.Identity(), b=nn.Conv2d(3, 4, 1))
    model = bw.prepare(net, image(), recipe={"SCHEDULE": {"REMOVE_IDENTITY": False}})
    assert "none" in targets(model)


def test_shared_and_repeated_modules_survive_every_schedule():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = nn.Embedding(11, 8)
            self.block = nn.Sequential(nn.Linear(8, 8), nn.Identity(), nn.ReLU(), nn.Dropout(0.0))
            self.head = nn.Linear(8, 11, bias=False)
            self.head.weight = self.words.weight

        def forward(self, tokens):
            x = self.words(tokens)
            for _ in range(3):
                x = x + self.block(x)
            return self.head(x.view(x.shape[0], -1, x.shape[2]).unbind(0)[0])

    tokens = torch.randint(0, 11, (2, 4))
    model = prepared(Tied(), tokens, torch.randint(0, 11, (5, 7)))
    assert model.head.weight is model.words.weight
    bw.calibrate(model, [tokens])
    assert torch.isfinite(model(tokens)).all()
