"""Accelerations of an objective: stacks of agents, their perceptrons, and Gram space."""
