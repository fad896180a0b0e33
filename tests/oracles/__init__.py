"""Brute-force truths, written plainly and without the code under test."""
