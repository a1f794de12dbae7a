"""`python -m pinscher`, and so `accelerate launch -m pinscher` and `torchrun -m pinscher`."""

from pinscher.cli import main

main()
