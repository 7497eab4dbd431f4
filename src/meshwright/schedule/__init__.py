"""Who does what, when, in a pipeline: actions, generators, lowering, a clock and a drawing."""
