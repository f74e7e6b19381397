"""Prose for docs/reproduction/studies.md: what the paper says, how to read the table, and caveats.

The verdicts and tables on the page are computed; these notes are written by hand about the tables in results/.
"""

NOTES: dict[str, str] = {
    "approximation-error": r"""
The paper says that local approximations are good only near the old solutions, and so at low learning rates. Quadratic
penalties have weight 1 here, unlike in Table 1. `laplace` diverges at the high rate. Along plain SGD's run the
second-order expansion with the whole Hessian divides the error of a constant by 1.9 at the low rate and by 1.3 at the
high one. A smooth loss leaves an error of one power more than the order; the kinks of ReLU networks leave r². The
paper's bound C rᵖ does not require errors to grow evenly.
""",
    "epsilon-region": r"""
The paper treats the ε-region of an expansion as a ball. Its radius along random directions is 35 to 70 times that
along principal eigenvectors. Over ε the radius grows as ε^0.50, ε^0.46 and ε^0.31 for the orders 0, 1 and 2; the
first term that a smooth loss leaves out gives exponents of 1, ½ and ⅓. The error is measured at the ends of epochs.
Seeds draw the angles, and the first tasks of some seeds are nearly equal.
""",
    "recursion": r"""
The paper writes forgetting as its quadratic approximation, which holds while learning is local. Terms of higher order
make 27 % of forgetting at the lowest learning rate and 59 % at the highest. The linear network has quadratic losses:
there the prediction must be exact, and is.
""",
    "locality": r"""
Definition 3.1 calls an approximation local if it depends on the solution θ_o. *explained* is the share of the
variance of \hat L_o that θ_o explains, *information* an estimate in nats, *p_value* that of a permutation test, which
decides. Four algorithms that the paper calls global are found local. For `si` the paper argues that its centre
θ_{t−1} moves with every task, but after one task that is θ_o. For `pnn`, `packnet` and `hat` it argues that the
derivative is taken at the current θ, but what they keep of a finished task is as it was at θ_o, and their \hat L_o is
a constant, like L_o(θ_o), the paper's own example of a local approximation. The paper calls iCaRL local because of
herding; with random exemplars θ_o still explains 6 %, through the targets that its network generates. Where
information is 0 and the verdict local (`ogd-published`, `icarl-random`, and `ogd` and `ogd-gtl` on split-mnist), θ_o
acts together with the memory's draws, which the estimate does not know.
""",
    "perturbation-cifar10": r"""
The paper: the score increases with the radius while that is small and drops to 1 after about 10³; the curve has much
the same shape for all tasks. The published figures compute the Hessian on a task's first 2,000 examples and divide
the sum of test losses by the number of training batches; here examples are spread over the whole task, losses are
means over their own examples, and everything is in double precision. In single precision the losses along
eigenvectors overflow from r = 1000 on, and a score computed from them is meaningless. With running statistics the
tasks' median scores differ by a factor of 103 at the median radius, with batch statistics by 3.4; the correlation of
two tasks' curves, in logarithms, is 1.00 and 0.98.
""",
    "perturbation-mnist": r"""
The paper: the score does not converge to 1 as the radius grows, and is much lower than on Split CIFAR-10. The highest
median score here is 1.96e4, against 2.46e4 (batch statistics) and 2.76e30 (running statistics) on Split CIFAR-10. The
20 tasks' median scores differ by a factor of 2.7 at the median radius; the correlation of two tasks' curves, in
logarithms, is 0.95.
""",
    "hessian-rank": r"""
The paper: the rank of the average Hessian is small compared with P and grows sub-linearly with the tasks. What it
calls effective rank is the number of eigenvalues above a threshold; here *effective rank* is exp(−Σ p log p) with p =
|λ| / Σ|λ|, which needs no threshold. How small the rank is depends on what counts as zero.
""",
    "flatness": r"""
The paper: near a solution the quadratic approximation makes flat minima forget less, as long as learning is local. ρ
is Spearman's rank correlation with forgetting after the last task. At one learning rate sharper solutions do not
forget more; ½ λ_max ‖θ_T − θ_o‖², which includes the distance, predicts forgetting better (ρ = 0.61 over all
solutions). Stable SGD uses batches of 16 and plain SGD batches of 64, as their authors do, so it makes four times as
many steps.
""",
    "theorem1": r"""
Theorem 4.1 states E(t) = ½ Δᵀ H̄ Δ ≥ 0 at minima that are close to each other, if nothing was forgotten before. The
last premise holds after the second task, which the table is about. After later tasks it does not: the largest |E|
before them is 1.3 in the median. Within an algorithm E(2) and the quadratic form are strongly rank-correlated (0.9
for sgd, 0.86 for ewc, 0.77 for optimal-hard, 0.33 for optimal-soft, 0.89 for ogd), so more is forgotten where the
form is larger, but their sizes differ.
""",
    "theorem2": r"""
Theorem 5.1: updates orthogonal to the gradients of old outputs have Δᵀ G Δ = 0, and with it Δᵀ H Δ ≈ 0 and no
forgetting, if the functional part is negligible. The constraint holds on the stored inputs; the table measures all of
them. At the lowest learning rate OGD keeps 9 % of SGD's Δᵀ G Δ and 6 % of its forgetting, at the highest 34 % and 61
%: the theorem holds best where learning is local.
""",
    "ogd-gtl": r"""
The appendix says that the true label's entry of ∇²_f ℓ exceeds the others by a factor of the order of K, K − 1 if a
confident network's other labels are equal. In trained networks it is 1.4 times the next entry at K = 10, since the
other labels do not share the rest equally. It never has more than half of the trace. Intervals of the verdict are 95
% t-intervals over seeds: −1.8 points (−2.8 to −0.9) at K = 10.
""",
    "stable-sgd": r"""
The paper observes less forgetting in the stable regime at all learning rates, more forgetting at higher rates in
both, and a trajectory that soon stays in one region. The stable regime here is dropout of 0.5 and a rate that decays
by 0.8 per task, without the momentum and the lower bound on the rate of its authors' code. Decay alone does most of
it; dropout alone forgets more than plain SGD.
""",
    "tradeoff": r"""
The paper says that higher learning rates make networks more plastic, and that global algorithms gain more by it,
since local ones pay with forgetting. Changes are from the two lowest learning rates to the two highest, in points.
The best final accuracy and its learning rate are chosen on test data. The verdict counts all rows, with the paper's
classes; [the claims](../reproduction.md#the-papers-claims-each-tested) are tested on the paper's rows, and with the
measured classes too.
""",
}
