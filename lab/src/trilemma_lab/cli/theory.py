"""`trilemma theory`: what the papers' theorems promise, with every constant."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from trilemma.base.errors import UserError
from trilemma.cli.options import AsJson, Byzantine, Clients, PluginOption, SigmaCor, SigmaInd


def theory_command(
    clients: Clients,
    dim: Annotated[int, typer.Option("-d", "--dim", help="number of parameters")],
    rounds: Annotated[int, typer.Option(help="number of rounds T")],
    byzantine: Byzantine = 0,
    rule: Annotated[
        list[str] | None, typer.Option(help="repeatable; without it, every rule with a κ")
    ] = None,
    sigma_ind: SigmaInd = None,
    sigma_cor: SigmaCor = None,
    examples: Annotated[int, typer.Option("-m", "--examples", help="examples per client")] = 1,
    batch: Annotated[int, typer.Option("-b", "--batch", help="examples in a batch")] = 1,
    smoothness: Annotated[float, typer.Option(help="L")] = 1.0,
    convexity: Annotated[float, typer.Option(help="μ; 0: the loss is not strongly convex")] = 0.0,
    gap: Annotated[float, typer.Option(help="loss of the start above the optimum")] = 1.0,
    variance: Annotated[float, typer.Option(help="variance σ² of one example's gradient")] = 1.0,
    g: Annotated[float, typer.Option(help="heterogeneity G")] = 1.0,
    g_cov: Annotated[float, typer.Option(help="heterogeneity G_cov")] = 1.0,
    gradients: Annotated[
        Path | None, typer.Option(help="measure G and G_cov on this .npy of honest gradients (clients, d)")
    ] = None,
    epsilon: Annotated[float | None, typer.Option(help="for the lower bound: example-level ε")] = None,
    delta: Annotated[float, typer.Option(help="for the lower bound")] = 1e-5,
    clip: Annotated[
        float | None, typer.Option(help="τ: order of Byz-Clip21's Theorem 5.1, noise --sigma-ind")
    ] = None,
    longest: Annotated[
        float | None, typer.Option(help="longest gradient at the start, beside --clip: Theorem D.1's too")
    ] = None,
    lr: Annotated[
        float | None, typer.Option(help="γ: Byz-Clip21's Theorem 5.2, no clip and no noise")
    ] = None,
    beta: Annotated[float, typer.Option(help="β of its momentum")] = 0.1,
    plugin: PluginOption = None,
    as_json: AsJson = False,
) -> None:
    """Compute the papers' bounds, with every constant.

    trilemma theory -n 7 -f 2 -d 69 -m 2764 -b 25 --rounds 400 --convexity 0.01 --sigma-ind 0.08
    trilemma theory -n 25 -f 5 -d 7850 --rounds 4500 --rule caf --clip 0.01 --sigma-ind 0.13 --longest 3
    """
    from trilemma.base import plugins
    from trilemma.cli.privacy import print_record
    from trilemma.privacy import NoiseLaw, mean_noise
    from trilemma.report.bounds import defined_rules
    from trilemma_lab import theory
    from trilemma_lab.theory import tables as laid_out

    plugins.load(plugin or ())
    if not 0 <= 2 * byzantine < clients:
        raise UserError(f"nothing is promised unless 0 ≤ 2f < n, got n = {clients}, f = {byzantine}")
    far = theory.Heterogeneity(g, g_cov) if gradients is None else theory.Heterogeneity.load(gradients)
    problem = theory.Problem(dim, far, smoothness, convexity, gap, variance, batch, examples)
    law = NoiseLaw(sigma_ind or 0.0, sigma_cor or 0.0)
    promises = [
        theory.rule_bounds(text, problem, law, clients, byzantine, rounds)
        for text in (rule or defined_rules(clients, byzantine))
    ]
    record: dict[str, Any] = {
        "heterogeneity": asdict(far),
        "mean_noise": mean_noise(law, clients, byzantine),
        "rules": [laid_out.promise_record(promise) for promise in promises],
    }
    tables = [laid_out.rule_table(record["rules"])]
    if epsilon is not None:
        lower = theory.lower_bound(epsilon, delta, clients, byzantine, examples, dim, far.g)
        record["lower_bound"] = laid_out.lower_record(lower)
        tables.append(laid_out.lower_table(record["lower_bound"]))
    if clip is not None or lr is not None:
        asked = laid_out.Clip21Question(
            problem, clients, byzantine, rounds, law.sigma_ind, clip, longest, lr, beta
        )
        record["byz_clip21"] = [
            asked.record(one.rule, one.kappa) for one in promises if one.kappa is not None
        ]
        tables.append(laid_out.clip21_table(record["byz_clip21"]))
    elif longest is not None:
        raise UserError("--longest is Theorem D.1's, which is about clipped vectors: give --clip too")
    print_record(record, tables, (), as_json)
