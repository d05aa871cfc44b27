"""The parts models are made of. Each is told its group, dtype and device; none reads a global."""
