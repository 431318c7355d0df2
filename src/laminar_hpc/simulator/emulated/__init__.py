"""An engine without a model, a GPU or weights: invented responses at the simulator's costs."""
