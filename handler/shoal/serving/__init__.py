"""What TorchServe needs around the library: request schema, audio encoding, the step loop."""
