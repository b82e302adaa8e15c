# Programs that try the worker and the server; BYTEPS_BUILD_TESTS asks for them.
add_library(worker_under_test STATIC ${WORKER_SOURCES} byteps/device/fake.cc)
target_compile_options(worker_under_test PRIVATE ${WARNINGS})
target_link_libraries(worker_under_test PUBLIC byteps_engine)

# Upstream's arrays, when they grow, copy nothing from nowhere: memcpy of 0 bytes from null.
set(ARRAYS_THAT_GROW)
if(BYTEPS_FUZZERS)
  set(ARRAYS_THAT_GROW -fno-sanitize=nonnull-attribute)
endif()

find_package(GTest)
if(GTest_FOUND)
  add_executable(engine_test
    tests/engine/declarations_test.cc
    tests/engine/device_test.cc
    tests/engine/engine_gpu_test.cc
    tests/engine/engine_test.cc
    tests/engine/failing_memory.cc
    tests/engine/failure_test.cc
    tests/engine/fake_channel.cc
    tests/engine/greeter_test.cc
    tests/engine/http_server_test.cc
    tests/engine/invariant_test.cc
    tests/engine/link_test.cc
    tests/engine/membership_test.cc
    tests/engine/pending_peers_test.cc
    tests/engine/meta_test.cc
    tests/engine/log_output_test.cc
    tests/engine/plan_test.cc
    tests/engine/protocol_test.cc
    tests/engine/push_scheduler_test.cc
    tests/engine/remains_test.cc
    tests/engine/server_step_test.cc
    tests/engine/server_test.cc
    tests/engine/stall_watch_test.cc
    tests/engine/status_test.cc
    # Needs no device, nor its headers.
    ${PSLITE}/src/rdma/wire.cc)
  target_compile_options(engine_test PRIVATE ${WARNINGS} ${ARRAYS_THAT_GROW})
  target_link_libraries(engine_test PRIVATE worker_under_test GTest::gtest_main)
  target_link_options(engine_test PRIVATE  # failing_memory.cc
    LINKER:--wrap=_Znwm,--wrap=_Znam,--wrap=_ZnamRKSt9nothrow_t)
  add_executable(connection_test
    tests/connection/choice_test.cc
    tests/connection/greeting_test.cc
    tests/connection/link.cc
    tests/connection/relay.cc
    tests/connection/sending_test.cc)
  target_compile_options(connection_test PRIVATE ${WARNINGS} ${ARRAYS_THAT_GROW})
  target_link_libraries(connection_test PRIVATE pslite GTest::gtest_main)
  add_executable(tls_test tests/tls/tls_test.cc)
  target_compile_options(tls_test PRIVATE ${WARNINGS})
  target_link_libraries(tls_test PRIVATE pslite GTest::gtest_main)
endif()

add_executable(sum_worker tests/jobs/sum_worker.cc)
target_compile_options(sum_worker PRIVATE ${WARNINGS})
target_link_libraries(sum_worker PRIVATE worker_under_test)

# It plays threads and time itself, which no sanitizer follows.
if(NOT BYTEPS_SANITIZE)
  add_executable(simulate
    tests/simulation/device.cc  # in place of fake.cc
    tests/simulation/job.cc
    tests/simulation/network.cc
    tests/simulation/plan.cc
    tests/simulation/probes.cc
    tests/simulation/simulate.cc
    tests/simulation/virtual_threads.cc
    tests/simulation/worker_script.cc)
  target_compile_options(simulate PRIVATE ${WARNINGS})
  target_link_libraries(simulate PRIVATE worker_under_test)
endif()

# What reads bytes that come from a network, one program for each parser (tests/fuzz).
if(BYTEPS_FUZZERS)
  add_custom_target(fuzzers)
  foreach(name declarations frame hello http membership meta rdma server)
    add_executable(${name}_fuzzer tests/fuzz/${name}_fuzzer.cc)
    target_compile_options(${name}_fuzzer PRIVATE ${WARNINGS} ${ARRAYS_THAT_GROW})
    target_link_options(${name}_fuzzer PRIVATE -fsanitize=fuzzer)
    target_link_libraries(${name}_fuzzer PRIVATE byteps_engine)
    add_dependencies(fuzzers ${name}_fuzzer)
  endforeach()
  # Needs no device, nor its headers.
  target_sources(rdma_fuzzer PRIVATE ${PSLITE}/src/rdma/wire.cc)
endif()
