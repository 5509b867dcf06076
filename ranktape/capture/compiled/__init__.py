"""Records what compiled code computes, inside of its graphs, and leaves what they compute as it is."""
