import os
from pathlib import Path

# Some virtual machines show AMX but do not let a process use it, and oneDNN dies of it in any product of bfloat16.
cpuinfo = Path("/proc/cpuinfo")
if cpuinfo.exists() and " amx_" in cpuinfo.read_text():
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import torch  # noqa: E402
from hypothesis import settings  # noqa: E402

# Tests run side by side on two cores; one thread each is faster than fighting over them.
torch.set_num_threads(1)

# A busy machine takes longer for an example now and then; tests have a time limit of their own.
settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")
