"""What travels on the bus: messages, their subjects and streams, the state's features, the codec."""
