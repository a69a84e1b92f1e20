"""The configuration groups. A package only so that Hydra finds them in an installed wheel (pkg://harness.conf)."""
