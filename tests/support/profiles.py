"""What tests of profiling share: prompts, and few samples of few strategies."""

STRATEGIES = "vanilla,eagle,lantern++"
PROMPTS = ("red heart", "dog face")
FEW = ("--quick", "--samples", "2", "--quality-images", "4", "--strategies", STRATEGIES)
