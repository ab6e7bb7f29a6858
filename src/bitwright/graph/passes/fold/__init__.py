"""What the schedules that fold share: how they note a refusal, arithmetic with constants, and channel shuffles."""
