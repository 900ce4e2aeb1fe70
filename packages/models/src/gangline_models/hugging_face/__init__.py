"""Hugging Face directories: conversion of config.json, tensor names and weights; export and import."""
