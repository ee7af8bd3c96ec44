SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help site c15 lab lab-status lab-down lab-clean lint unit molecule test docs

SITE := scripts/env site
TEST := scripts/env test
LAB := $(SITE) ansible-playbook -i inventory/lab

help: ## Show the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

site: lab ## Bring up the lab, then set up GPU slicing on it and prove it
	$(LAB) site.yml

c15: export GPU_NAMESPACE ?= gpu-slices
c15: ## The end-to-end case c15 on the lab as it stands (scripts/c15 tells skipped, 77, from failed)
	$(SITE) scripts/c15

lab: ## Bring up the lab (real Kubernetes on Podman nodes, emulated silicon)
	scripts/lab up

lab-status: ## Show the lab's nodes, versions and slices
	scripts/lab status

lab-down: ## Take the lab down; the cache stays
	scripts/lab down

lab-clean: ## Take the lab down and drop the cache
	scripts/lab clean

lint: ## Run every linter
	$(TEST) scripts/lint

unit: ## Run the unit, render and emulator tests
	$(TEST) scripts/unit

molecule: ## Run the molecule scenarios
	$(TEST) scripts/molecule

test: ## Lint, unit tests and molecule: everything CI runs
	$(TEST) scripts/test

docs: ## Write the generated parts of docs/ anew
	$(TEST) python3 scripts/role_docs.py
