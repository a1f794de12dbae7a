import torch

# Tests run side by side on two cores; one thread each is faster than fighting over them.
torch.set_num_threads(1)
