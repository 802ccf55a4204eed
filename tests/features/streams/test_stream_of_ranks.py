"""A stream on several ranks, of which one cannot read on."""

import test_launchers
import torture
from helpers import only

from foundry.common.whole_folders import damage


@only("test_a_stream_that_breaks")
class StreamOfRanksTest(test_launchers.LauncherTest):
    def test_a_stream_that_breaks_off_on_one_rank_is_told_and_saved(self):
        out = self.folder / "breaks_off"
        flags = torture.changed(self.commands["pre_train_stream"], "--save_steps", "100", "--output_dir", str(out))
        text = self.failing(*flags, program="features/streams/failing_stream.py")
        self.assertRegex(text, "error: the network is gone; .*/checkpoint-3 holds the weights from before this step\n")
        self.assertNotIn("[rank0]", text)
        self.assertIsNone(damage(out / "checkpoint-3"))
