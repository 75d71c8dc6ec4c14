"""Self-play without an oracle (DeepSeekMath-V2, arXiv:2511.22570): a generator writes proofs and judges them, verifiers judge each
proof, meta-verifiers judge whether the defects that the verifiers claim exist, and confirmed scores become labels."""
