"""How messages travel between the controller and the other ranks: each once and in order, over broken
connections and controllers that start again."""
