"""One file for each way to run a program, all with the same calls:

traits(index) -> plan.Traits;  compile(program, index) -> kernel;  launch(kernel, blocks, arguments, …) runs it.
"""
