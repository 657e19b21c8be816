"""What the hardware did: devices -> samples -> windows -> energy, throttling, temperature."""
