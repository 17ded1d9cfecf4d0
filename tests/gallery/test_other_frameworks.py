"""The code of Keras, PyTorch and PEFT in the documentation, executed beside ours, and what the pages say of both.

``make test`` runs the code of Keras. ``make gallery`` also installs PyTorch and PEFT.
"""

import doctest
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_freeze as fz

KERAS, PYTORCH = pathlib.Path("docs/equinox_haiku_keras.md"), pathlib.Path("docs/from_pytorch.md")
OURS = {"jax": jax, "jnp": jnp, "np": np, "optax": optax, "fz": fz}

pytestmark = pytest.mark.filterwarnings("ignore")  # of the packages


def section(page, title):
    """The blocks of a section as source code: theirs (``python``), and ours (``pycon``)."""
    [text] = [part for part in page.read_text(encoding="utf-8").split("\n## ") if part.startswith(f"{title}\n")]
    theirs, ours = (re.findall(rf"^```{kind}\n(.*?)^```$", text, re.M | re.S) for kind in ("python", "pycon"))
    parser = doctest.DocTestParser()
    return theirs, ["".join(example.source for example in parser.get_examples(block)) for block in ours]


def run(source, names):
    exec(compile(source, "<block of the documentation>", "exec"), names)


def arrays(module):
    """Copies of the parameters and buffers of a PyTorch module."""
    return {name: tensor.numpy().copy() for name, tensor in module.state_dict().items()}


def changed(before, after):
    return {name for name, array in before.items() if array.tobytes() != after[name].tobytes()}


def tree(flat):
    """Nested dicts of a ``state_dict``: ``encoder.weight`` gets the path ``encoder/weight``."""
    nested = {}
    for name, array in flat.items():
        *parents, last = name.split(".")
        node = nested
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = array
    return nested


def test_the_pages_name_the_versions_of_the_requirements():
    required = pathlib.Path("tests/gallery/pytorch_requirements.txt").read_text()
    text = KERAS.read_text(encoding="utf-8") + PYTORCH.read_text(encoding="utf-8")
    named = re.findall(r"\b(keras|torch|peft|transformers) (\d+\.\d+\.\d+)", text)
    assert len(named) == 4
    assert [version for version in named if "==".join(version) not in required.split()] == []


class TestKeras:
    @pytest.fixture
    def names(self):
        """A model, whose body is not trainable after ``self.step``."""
        import keras

        [self.step], (setup, self.our_step) = section(KERAS, "Keras 3")
        keras.utils.set_random_seed(0)  # AdamW divides by the gradient: one near zero would show roundings
        names = {**OURS, "keras": keras, "x": np.random.default_rng(0).normal(size=(8, 3)).astype("float32")}
        run(setup, names)
        return names

    def test_a_step_equals_ours(self, names, capsys):
        net = names["net"]
        before = [weight.numpy() for weight in net.weights]
        run(self.our_step, names)
        ours = {path: np.asarray(value) for path, value in names["params"].items()}
        for weight, value in zip(net.weights, before, strict=True):
            weight.assign(value)
        run(self.step, names)
        moved = [weight for weight, old in zip(net.weights, before, strict=True) if (weight.numpy() != old).any()]
        assert [weight.path for weight in moved] == ["net/head/kernel", "net/head/bias"]  # no statistics either
        for weight in moved:
            np.testing.assert_allclose(weight, ours[weight.path], rtol=1e-5, atol=1e-7)
        assert not net.body.trainable_weights
        trained = sum(int(np.prod(weight.shape)) for weight in net.trainable_weights)
        assert f"trainable params: {trained} || all params: 29 ||" in capsys.readouterr().out

    def test_frozen_batch_normalization_runs_in_inference_mode(self, names):
        norm = names["keras"].layers.BatchNormalization()
        norm.build((8, 3))
        for trainable in (True, False):
            norm.trainable = trainable
            before = norm.moving_mean.numpy()
            _ = norm(names["x"], training=True)
            assert (norm.moving_mean.numpy() != before).any() == trainable

    def test_a_functional_model_passes_training_on_to_every_layer(self, names):
        keras = names["keras"]
        norm, inputs = keras.layers.BatchNormalization(), keras.Input((3,))
        model = keras.Model(inputs, norm(inputs, training=False))
        before = norm.moving_mean.numpy()
        _ = model(names["x"], training=True)
        assert (norm.moving_mean.numpy() != before).all()

    def test_a_change_after_the_first_step_needs_compile_with_a_new_optimizer(self, names):
        keras, net, x, y = (names[name] for name in ("keras", "net", "x", "y"))
        optimizer = keras.optimizers.AdamW(1e-3)
        net.compile(optimizer=optimizer, loss="mse")
        net.train_on_batch(x, y)
        net.body.trainable = False
        with pytest.raises(ValueError, match="optimizer was built with"):
            net.train_on_batch(x, y)
        net.compile(optimizer=optimizer, loss="mse")
        with pytest.raises(ValueError, match="optimizer was built with"):
            net.train_on_batch(x, y)
        run(self.step, names)


class TestPyTorch:
    @pytest.fixture
    def torch(self):
        torch = pytest.importorskip("torch")
        torch.manual_seed(0)
        return torch

    @pytest.fixture
    def model(self, torch):
        return torch.nn.ModuleDict({"encoder": torch.nn.Linear(3, 4), "head": torch.nn.Linear(4, 1)})

    @staticmethod
    def backward(torch, model):
        model["head"](model["encoder"](torch.ones(2, 3))).square().mean().backward()

    def test_a_step_equals_ours(self, torch, capsys):
        (setup, step), (our_setup, our_step) = section(PYTORCH, "PyTorch")
        names = {}
        run(setup, names)
        model, before = names["model"], arrays(names["model"])
        run(step, names)
        after = arrays(model)
        assert changed(before, after) == {"head.weight", "head.bias"}

        ours = {**OURS}
        run(our_setup, ours)
        ours["state_dict"] = before
        run(our_step, ours)
        new = {name.replace("/", "."): array for name, array in ours["params"].items()}
        assert new.keys() == after.keys()
        for name, array in new.items():
            np.testing.assert_allclose(array, after[name], rtol=1e-6, atol=1e-7)
        assert float(ours["value"]) == pytest.approx(names["loss"].item(), rel=1e-6)
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        assert fz.summary(ours["params"], "encoder").trainable_elements == trained
        assert f"trainable params: {trained} || all params: {sum(p.numel() for p in model.parameters())} ||" in (
            capsys.readouterr().out
        )

    def test_an_old_gradient_moves_what_is_frozen_until_zero_grad(self, torch, model):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        self.backward(torch, model)
        model["encoder"].requires_grad_(False)
        before = arrays(model["encoder"])
        optimizer.step()
        moved = arrays(model["encoder"])
        assert changed(before, moved) == {"weight", "bias"}
        optimizer.zero_grad()
        self.backward(torch, model)
        optimizer.step()
        assert not changed(moved, arrays(model["encoder"]))

    @pytest.mark.parametrize("decay", [0.01, 0.0], ids=["decay", "momentum"])
    def test_gradients_of_zeros_are_stepped(self, torch, model, decay):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=decay)
        self.backward(torch, model)
        if not decay:
            optimizer.step()  # leaves moments
        model["encoder"].requires_grad_(False)
        optimizer.zero_grad(set_to_none=False)
        before = arrays(model["encoder"])
        self.backward(torch, model)
        optimizer.step()
        assert changed(before, arrays(model["encoder"])) == {"weight", "bias"}

    def test_a_hook_does_not_stop_weight_decay_and_rows_do(self, torch, model):
        weight, mask = model["head"].weight, torch.tensor([[0.0, 0.0, 1.0, 1.0]])
        weight.register_hook(lambda grad: grad * mask)
        before = weight.detach().numpy().copy()
        self.backward(torch, model)
        torch.optim.AdamW(model.parameters(), lr=0.1).step()
        assert (weight.detach().numpy() != before).all()

        params, frozen = {"weight": jnp.asarray(before)}, {"weight": fz.rows([0, 1], axis=1)}
        tx = fz.freeze(optax.adamw(0.1, weight_decay=0.01), frozen)
        updates, _ = tx.update(jax.tree.map(jnp.ones_like, params), tx.init(params), params)
        new = optax.apply_updates(params, updates)
        assert np.asarray(new["weight"][:, :2]).tobytes() == before[:, :2].tobytes()
        assert (new["weight"][:, 2:] != before[:, 2:]).all()

    def test_running_statistics_change_until_eval_and_again_after_train(self, torch):
        norm = torch.nn.BatchNorm1d(3).requires_grad_(False)
        for mode, moves in ((norm.train, True), (norm.eval, False), (norm.train, True)):
            mode()
            before = arrays(norm)
            norm(torch.randn(8, 3))
            assert bool(changed(before, arrays(norm))) == moves

    @pytest.mark.parametrize("cut", [True, False], ids=["no_grad", "requires_grad_"])
    def test_no_grad_also_cuts_the_layers_before(self, torch, cut):
        first, middle, last = (torch.nn.Linear(3, 3) for _ in range(3))
        middle.requires_grad_(False)
        with torch.set_grad_enabled(not cut):
            hidden = middle(first(torch.ones(2, 3)))
        last(hidden).sum().backward()
        assert (first.weight.grad is None) == cut


class TestPEFT:
    @pytest.fixture
    def names(self, monkeypatch, tmp_path):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # before the import
        pytest.importorskip("peft")
        return {}

    @pytest.fixture
    def blocks(self):
        return section(PYTORCH, "Hugging Face PEFT")

    def test_a_step(self, blocks, names, capsys, tmp_path):
        (setup, step), (our_setup, our_step) = blocks
        run(setup, names)
        before = arrays(names["base"])
        capsys.readouterr()
        run(step, names)
        [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("trainable params")]
        assert f"print_trainable_parameters()\n# {line}\n" in step

        model = names["model"]
        parameters = {name: p.detach().numpy() for name, p in model.named_parameters()}
        trained = {name for name, p in model.named_parameters() if p.requires_grad}
        frozen = {plain(name): array for name, array in parameters.items() if name not in trained}
        assert not changed({name: array for name, array in before.items() if name in frozen}, frozen)
        assert frozen.keys() == before.keys()

        ours = {**OURS}
        run(our_setup, ours)
        run(our_step, ours)
        count = sum(parameters[name].size for name in trained)
        assert fz.summary(ours["params"], ours["frozen"]).trainable_elements == count
        state = [value for values in names["optimizer"].state.values() for value in values.values() if value.ndim]
        ours_state = [leaf for leaf in jax.tree.leaves(ours["state"]) if leaf.ndim]
        assert sum(value.numel() for value in state) == sum(leaf.size for leaf in ours_state) == 2 * count

        safetensors = pytest.importorskip("safetensors.numpy")
        saved = safetensors.load_file(tmp_path / "adapter" / "adapter_model.safetensors")
        assert sum(array.size for array in saved.values()) == count  # neither the base nor the table

    def test_one_tree_one_line(self, blocks, names, capsys):
        (setup, step), _ = blocks
        run(setup, names)
        run(step, names)
        flat = {name: p.detach().numpy() for name, p in names["model"].named_parameters()}
        capsys.readouterr()
        names["model"].print_trainable_parameters()
        line = capsys.readouterr().out
        adapters = fz.path("**/lora_[AB]/**", "**/modules_to_save/**", "**/trainable_tokens_delta/**")
        fz.print_trainable(tree(flat), ~adapters)
        assert capsys.readouterr().out == line

    def test_copies_are_the_difference_of_all_params(self, blocks, names):
        (setup, step), _ = blocks
        run(setup, names)
        base = sum(p.numel() for p in names["base"].parameters())
        run(step, names)
        trained, counted = names["model"].get_nb_trainable_parameters()
        adapters = sum(p.numel() for name, p in names["model"].named_parameters() if ".lora_" in name)
        assert counted - base - adapters == 3 * 8 + 2 * 8  # score, and two rows of tokens
        assert trained == adapters + 3 * 8 + 2 * 8

    def test_other_lines_of_the_table(self, blocks):
        _, (our_setup, _) = blocks
        ours = {**OURS}
        run(our_setup, ours)
        two_layers = fz.resolve(ours["params"], fz.rules({"layers/[23]/*/lora_[ab]": False}, default=True))
        assert two_layers == fz.resolve(ours["params"], fz.rules({"**/lora_[ab]": False}, default=True))


def plain(name):
    """The name of a frozen parameter in the model before PEFT."""
    for part in ("base_model.model.", "token_adapter.", "base_layer.", "original_module."):
        name = name.replace(part, "", 1)
    return name
