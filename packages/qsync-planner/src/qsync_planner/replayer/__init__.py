"""The replayer: what a plan costs in time and memory (cost mapper, simulator, memory model, calibration)."""
