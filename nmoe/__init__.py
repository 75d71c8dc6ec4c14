"""nmoe: post-training of mixture-of-experts language models by reinforcement learning from verifiable rewards."""
