"""foundry/training/resharding.py in one process; tests/slow/test_launchers.py has the others. Hermetic; a second."""

import tempfile
from pathlib import Path

import torch
from absl.testing import parameterized

from foundry.common.errors import UserError
from foundry.training.resharding import load_state, whole_state


class LoadStateTest(parameterized.TestCase):
    @parameterized.parameters(
        (["weight", "bias"], None),
        (["weight"], "bias"),
        (["weight", "bias", "other"], "other"),
    )
    def test_states_are_those_of_the_trained_tensors(self, names, wrong):
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(model.parameters())
        model.weight.grad = torch.ones(2, 3)
        model.bias.grad = torch.ones(2)
        optimizer.step()
        saved = whole_state(model, optimizer, keep=True)
        saved["state"]["other"] = saved["state"]["bias"]
        saved["state"] = {name: saved["state"][name] for name in names}
        path = Path(self.enter_context(tempfile.TemporaryDirectory())) / "optimizer.pt"
        torch.save(saved, path)

        fresh = torch.optim.AdamW(model.parameters())
        if wrong:
            with self.assertRaisesRegex(UserError, f"{path}: .* other tensors were trained; compare {wrong}"):
                load_state(model, fresh, path)
        else:
            load_state(model, fresh, path)
            torch.testing.assert_close(fresh.state[model.weight]["exp_avg"], torch.full((2, 3), 0.1))
            self.assertIn("exp_avg", fresh.state[model.bias])
