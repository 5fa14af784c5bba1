"""What can be proven of the AMD side without a card: variants of the plans, what is allowed of their code, planted
faults. tests/test_amd.py runs it."""
