"""Pure decisions: no clock, no socket, no file. The controller and the simulator call the same ones; each has
its invariant in its docstring and a property test."""
