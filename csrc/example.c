/* Reads observations of floats from standard input, in the byte order of the machine, and prints the decision about each:
 *
 *   ./decide policy.bin < observations.raw
 */
#include <stdio.h>
#include <stdlib.h>

#include "policy.h"

int main(int argc, char **argv) {
  if (argc != 2) {
    fprintf(stderr, "usage: %s policy.bin < observations\n", argv[0]);
    return 2;
  }
  char error[200];
  sortrl_policy *policy = sortrl_open(argv[1], error, sizeof error);
  if (!policy) {
    fprintf(stderr, "%s: %s\n", argv[1], error);
    return 1;
  }
  const size_t size = (size_t)sortrl_observation_size(policy);
  float *observation = malloc(size * sizeof *observation);
  while (observation && fread(observation, sizeof *observation, size, stdin) == size) {
    sortrl_decision decision;
    const sortrl_status status = sortrl_decide(policy, observation, &decision);
    if (status == SORTRL_DECIDED)
      printf("%d %.17g %d\n", (int)decision.action, decision.radius, (int)decision.runner_up);
    else
      printf("no decision: status %d\n", (int)status); /* stop, or fall back on something safe */
  }
  free(observation);
  sortrl_close(policy);
  return 0;
}
