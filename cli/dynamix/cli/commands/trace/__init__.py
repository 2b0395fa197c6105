"""Send one OpenTelemetry trace per window of a job: report, window, action, applied."""
