"""The way of the weights: canonical layout, mapping, kernels, slots, links, and the relay ranks."""
