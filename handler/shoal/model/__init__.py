"""The two networks of Fish Speech 1.5: the dual-AR transformer and the Firefly codec."""
