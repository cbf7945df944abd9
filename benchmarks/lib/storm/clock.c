/* A preloaded library that shifts the wall clock of a process, and of nothing else on the machine.

   The file named by STORM_CLOCK holds one signed 64-bit number: nanoseconds to add to
   CLOCK_REALTIME. Every process maps it, so all of them jump at once. Other clocks are left alone:
   a change of the wall clock does not touch CLOCK_MONOTONIC either. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const int64_t BILLION = 1000000000;
static const volatile int64_t *offset;
static int (*system_clock_gettime)(clockid_t, struct timespec *);

__attribute__((constructor)) static void map_offset(void) {
  system_clock_gettime = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
  const char *path = getenv("STORM_CLOCK");
  int file = path == NULL ? -1 : open(path, O_RDONLY | O_CLOEXEC);
  if (file < 0)
    return;
  void *memory = mmap(NULL, sizeof *offset, PROT_READ, MAP_SHARED, file, 0);
  if (memory != MAP_FAILED)
    offset = memory;
  close(file);
}

int clock_gettime(clockid_t clock, struct timespec *time) {
  if (system_clock_gettime == NULL) /* another constructor asks before ours */
    system_clock_gettime = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
  int status = system_clock_gettime(clock, time);
  if (status != 0 || offset == NULL || (clock != CLOCK_REALTIME && clock != CLOCK_REALTIME_COARSE))
    return status;
  int64_t total = (int64_t)time->tv_sec * BILLION + time->tv_nsec + *offset;
  time->tv_sec = total / BILLION;
  time->tv_nsec = total % BILLION;
  return 0;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
  (void)zone;
  struct timespec time;
  int status = clock_gettime(CLOCK_REALTIME, &time);
  now->tv_sec = time.tv_sec;
  now->tv_usec = time.tv_nsec / 1000;
  return status;
}

time_t time(time_t *result) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (result != NULL)
    *result = now.tv_sec;
  return now.tv_sec;
}
