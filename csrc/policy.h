/* A certified policy in C: one observation in; the action and the radius within which it provably does not change out.
 *
 *   char error[200];
 *   sortrl_policy *policy = sortrl_open("policy.bin", error, sizeof error);
 *   sortrl_decision decision;
 *   if (policy && sortrl_decide(policy, observation, &decision) == SORTRL_DECIDED) act(decision.action);
 *   sortrl_close(policy);
 *
 * `sortrl export RUN --c DIR` writes policy.bin, this header, the sources behind it and an example with its Makefile. A decision
 * allocates no memory, takes no lock and makes no system call. The library keeps nothing outside of the policies it opened. */
#ifndef SORTRL_POLICY_H
#define SORTRL_POLICY_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct sortrl_policy sortrl_policy;

typedef struct {
  int32_t action;
  int32_t runner_up; /* the action with the second highest score */
  double radius;     /* No observation changes the action whose numbers, in unit space ((raw - mean) / scale), are all at most
                        this far from those that were given. 0: nothing is certified. */
  double margin;     /* between the scores of the two */
} sortrl_decision;

typedef enum {
  SORTRL_DECIDED = 0,
  SORTRL_NOT_FINITE = 1, /* the observation has NaN or infinity in it, or is too large for float */
  SORTRL_OVERFLOW = 2,   /* the scores are too large for float */
  SORTRL_BUSY = 3        /* another thread is using this policy; open it once per thread */
} sortrl_status;

/* NULL where the file cannot be read or is damaged; `error` then says why. Free with sortrl_close. */
sortrl_policy *sortrl_open(const char *path, char *error, size_t error_size);
/* The same for a file that is in memory already; its bytes are copied. */
sortrl_policy *sortrl_read(const void *bytes, size_t size, char *error, size_t error_size);
void sortrl_close(sortrl_policy *policy);

int64_t sortrl_observation_size(const sortrl_policy *policy); /* how many numbers an observation has, row by row */
int64_t sortrl_actions(const sortrl_policy *policy);

/* What to do in a raw observation, as the sensors or the camera give it. `decision` is only written on SORTRL_DECIDED. */
sortrl_status sortrl_decide(sortrl_policy *policy, const float *observation, sortrl_decision *decision);
sortrl_status sortrl_decide_double(sortrl_policy *policy, const double *observation, sortrl_decision *decision);
sortrl_status sortrl_decide_bytes(sortrl_policy *policy, const uint8_t *observation, sortrl_decision *decision);

#ifdef __cplusplus
}
#endif
#endif
